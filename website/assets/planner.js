// The planner: the numbers of `minipar plan`, drawn.
import { $, ask, fill, fromLink, newest, onChange, say, settings } from "./common.js";
import { layoutHtml, layoutTitle, planHtml } from "./pictures.mjs";

const form = $("#settings");
const one = $("#one");
const request = () => ({ ...settings(form), ...settings(one) });

function showLayout(answer) {
  if (answer.error) return say(answer.error, true);
  say("");
  $("#layout").innerHTML = `<h3>${layoutTitle(answer)}</h3>${layoutHtml(answer)}`;
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
  $("#best").innerHTML = planHtml(answer);
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
