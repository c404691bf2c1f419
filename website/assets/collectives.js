// Collectives step by step, from recordings of real ranks; and the alpha-beta model's curves.
import { $, fill, fromLink, newest, onChange, say, settings } from "./common.js";
import { number } from "./drawing.mjs";
import { stepper } from "./moving.js";
import { collective, raceHtml } from "./pictures.mjs";

const form = $("#settings");
const model = $("#model");
const recordings = JSON.parse($("#recordings").textContent);

function sizes() {
  const offered = Object.keys(recordings[form.elements.collective.value]);
  fill(form.elements.p, offered, offered.includes(form.elements.p.value) ? form.elements.p.value : offered.includes("4") ? "4" : offered[0]);
}

function draw(moving = false) {
  const recording = recordings[form.elements.collective.value][form.elements.p.value];
  const slider = form.elements.step;
  slider.max = recording.steps.length;
  const at = Math.min(Number(slider.value), recording.steps.length);
  const box = $("#picture");
  const { picture, text, sent } = collective(recording, { step: at }, Math.max(300, box.clientWidth || 900), { moving });
  box.innerHTML = picture;
  $("#status").innerHTML = text;
  $("#at").textContent = `${at} of ${recording.steps.length}`;
  $("#sent").innerHTML = `<table><thead><tr><th>sent so far</th>${sent.map((_, rank) => `<th>rank ${rank}</th>`).join("")}</tr></thead><tbody><tr><td>of the vector</td>${sent.map((share) => `<td>${number(share)}</td>`).join("")}</tr></tbody></table>`;
  document.body.dataset.step = `${at} ${sent[0]}`;
}

function race(answer) {
  if (answer.error) return say(answer.error, true);
  $("#curves").innerHTML = raceHtml(answer);
}

const curves = newest("curves", race);
const steps = stepper(form, $("#picture"), () => draw(true), () => draw());

fill(form.elements.collective, Object.keys(recordings), "all-reduce, ring");
sizes();
fromLink(form);
onChange(form, (event) => {
  if (event?.target.name === "step") return steps.step();
  if (event?.target.name === "collective") form.elements.step.value = 1;
  sizes();
  draw();
});
draw();
$("#play").addEventListener("click", steps.play);
race(JSON.parse($("#first-curves").textContent)); // computed when the site was built: there before Python is
onChange(model, () => curves(settings(model)));
