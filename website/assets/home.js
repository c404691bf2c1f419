// The home page's pipeline: every choice was simulated when the site was built, so it moves at once and needs no Python.
import { $, percent, span, timeline } from "./common.js";

const recorded = JSON.parse($("#recorded").textContent);
const form = $("#settings");
const box = $("#first");

function draw() {
  const schedule = form.elements.schedule.value;
  const p = recorded.p[form.elements.p.value];
  const m = recorded.m[form.elements.m.value];
  const answer = recorded.answers[`${schedule} ${p} ${m}`];
  // All schedules of this size share one axis, so that a shorter step is shorter on the page.
  const end = Math.max(...Object.keys(recorded.names).map((name) => span(recorded.answers[`${name} ${p} ${m}`])));
  const width = Math.max(300, box.clientWidth || 900);
  const held = Math.max(...answer.peak_live);
  const idle = percent(answer.bubble_over_total);
  box.innerHTML = timeline(answer, width, end, `${recorded.names[schedule]} on ${p} ranks, ${m} microbatches`).svg.replace("<svg ", '<svg role="img" ');
  $("#status").innerHTML = `<b>${recorded.names[schedule]}</b>, ${p} ranks, ${m} microbatches: a rank waits <b data-bubble="${answer.bubble_over_total}">${idle}</b> of the time, and holds up to <b>${held}</b> microbatches' activations.`;
  for (const name of ["p", "m"]) form.elements[name].nextElementSibling.textContent = recorded[name][form.elements[name].value];
  document.body.dataset.drawn = `${schedule} ${p} ${m}`;
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", draw);
addEventListener("resize", draw);
draw();
