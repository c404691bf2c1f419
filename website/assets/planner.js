// The planner: the numbers of `minipar plan`, drawn.
import { $, ask, bytes, escape, fill, fromLink, newest, onChange, percent, say, settings, stacked } from "./common.js";

const form = $("#settings");
const one = $("#one");
const seconds = (value) => `${value >= 10 ? value.toFixed(1) : value.toFixed(3)} s`;
const request = () => ({ ...settings(form), ...settings(one) });

function showLayout(answer) {
  if (answer.error) return say(answer.error, true);
  const memory = Object.values(answer.memory).reduce((a, b) => a + b, 0);
  const fits = memory <= answer.card;
  say("");
  $("#layout").innerHTML = `<h3>${escape(answer.layout)}: ${seconds(answer.seconds)} a step, MFU ${percent(answer.mfu)}, HFU ${percent(answer.hfu)}</h3>
    <p class="${fits ? "good" : "wrong"}">pp rank ${answer.fullest_pp_rank} is the fullest: ${bytes(memory)} of ${bytes(answer.card)}: ${fits ? "fits" : `${bytes(memory - answer.card)} too much`}</p>
    <h4>Memory</h4>${stacked(answer.memory, answer.card, bytes, "memory by kind, with the card as a dashed line")}
    <h4>A step</h4>${stacked(answer.parts, null, seconds, "time of a step by part")}`;
  document.body.dataset.layout = answer.layout;
}

// One of the plan's layouts: the form says it, too.
function choose(best, card) {
  for (const [name, value] of Object.entries(best.form)) one.elements[name].value = value;
  showLayout({ ...best, card });
}

const layouts = newest("layout", showLayout);

function showPlan(answer) {
  document.body.removeAttribute("data-busy");
  if (answer.error) return say(answer.error, true);
  say(`${answer.legal.toLocaleString("en")} legal layouts, ${answer.weighed.toLocaleString("en")} weighed, ${answer.fit.toLocaleString("en")} of these fit`);
  const rows = answer.best.map((best, i) => {
    const memory = Object.values(best.memory).reduce((a, b) => a + b, 0);
    return `<tr><td><button type="button" data-i="${i}">${escape(best.layout)}</button></td><td>${seconds(best.seconds)} ± ${Math.round(100 * best.doubt)} %</td><td>${bytes(memory)}</td><td>${percent(best.mfu)}</td></tr>`;
  });
  const why = answer.why.map((r) => `<tr><td>${escape(r.axis)}=${escape(r.value)}</td><td>${escape(r.text)}</td></tr>`);
  const near = answer.near === 1 ? "No other layout is within 5 % of the fastest." :
    `${answer.near.toLocaleString("en")} layouts are within 5 % of the fastest, nearer than the model can tell: of each mesh the simplest, the simplest of all first.`;
  $("#best").innerHTML = `<h3>${escape(answer.job)}</h3>
    <p>${near}</p>
    <div class="scroll"><table><thead><tr><th>layout</th><th>step</th><th>memory</th><th>MFU</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>
    <h3>Why not the others</h3><div class="scroll"><table><thead><tr><th>family</th><th>against the first</th></tr></thead><tbody>${why.join("")}</tbody></table></div>
    <h3>The commands of the first</h3><pre><code>${answer.commands.map(escape).join("\n")}</code></pre>`;
  for (const button of $("#best").querySelectorAll("button")) {
    button.addEventListener("click", () => {
      choose(answer.best[button.dataset.i], answer.card);
      $("#layout").scrollIntoView({ behavior: "smooth", block: "nearest" });
    });
  }
  choose(answer.best[0], answer.card);
  document.body.dataset.plan = `${answer.best[0].layout} ${answer.best[0].seconds}`;
}

const plans = newest("plan", showPlan);

function search() {
  document.body.dataset.busy = "plan";
  say("searching all layouts ...");
  plans(settings(form));
}

const names = JSON.parse($("#choices").textContent);
fill(form.elements.model, names.models, "llama-70b");
fill(form.elements.machine, names.machines, "a100-80gb");
fill(one.elements.schedule, names.schedules.filter((name) => name !== "zb-auto"), "1f1b");
fromLink(form);
fromLink(one);
if (location.hash) {
  search();
} else {
  showPlan(JSON.parse($("#first-plan").textContent)); // computed when the site was built: there before Python is
  ask("choices", {}); // starts Python meanwhile
}
onChange(form, () => {});
$("#search").addEventListener("click", search);
onChange(one, () => layouts(request()));
