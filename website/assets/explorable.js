// An explorable: every choice was computed when the site was built, so it moves at once and needs no Python. The pipeline
// becomes Python's own once it has been touched and Python has started: then it takes any number of ranks and microbatches.
import { stepper } from "./moving.js";
import { PICTURES, recordedPicture } from "./pictures.mjs";

const $ = (selector) => document.querySelector(selector);
const recording = JSON.parse($("#recorded").textContent);
const form = $("#settings");
const box = $("#first");
const LIVE = { p: { min: 1, max: 8 }, m: { min: 1, max: 24 } };
let live = null; // once Python is there: the function that asks it
const width = () => Math.max(300, box.clientWidth || 900);

const places = () => Object.fromEntries(recording.fields.map(({ name }) => [name, Number(form.elements[name].value)]));

function show({ picture, text, link, most = {} }, drawn) {
  box.innerHTML = picture;
  $("#status").innerHTML = text;
  for (const [name, value] of Object.entries(most)) form.elements[name].max = value;
  for (const { name, values, labels } of recording.fields) {
    const at = Math.min(form.elements[name].value, form.elements[name].max || Infinity);
    const said = live && name in LIVE ? at : (labels ?? values)[at];
    const output = form.elements[name].parentElement.querySelector("output");
    if (output) output.textContent = said;
  }
  const more = $("#more");
  if (more && link) more.hash = new URLSearchParams({ ...Object.fromEntries(new URLSearchParams(more.dataset.settings)), ...link });
  document.body.dataset.drawn = drawn;
}

function draw() {
  if (live) return live();
  const at = places();
  const shown = recordedPicture(recording, at, width());
  show(shown, recording.fields.map(({ name, values }) => values[at[name]]).join(" "));
}

// Python, after the first touch -----------------------------------------------------------------------------------------

async function begin() {
  form.removeEventListener("input", begin);
  if (recording.kind !== "pipeline" || navigator.connection?.saveData || location.protocol === "file:") return;
  const { newest, started } = await import("./common.js");
  const schedules = recording.fields[0].values;
  const ask = newest("pipeline", (answer, { schedule, p, m }) => {
    const shown = PICTURES.pipeline(answer, { schedule, p, m }, width(), { ...recording.constants, end: 0 });
    show({ ...shown, text: `${shown.text} <span class="quiet">Computed by minipar, here.</span>` }, `${schedule} ${p} ${m} live`);
  });
  if (!(await started())) return;
  const at = places();
  for (const [name, range] of Object.entries(LIVE)) {
    const { values } = recording.fields.find((field) => field.name === name);
    Object.assign(form.elements[name], range);
    form.elements[name].value = values[at[name]];
  }
  live = () => ask({ schedule: schedules[form.elements.schedule.value], p: Number(form.elements.p.value), m: Number(form.elements.m.value) });
  draw();
}

// A collective's step: its chunks move.
const steps = recording.kind === "collective" && stepper(form, box, () => show(recordedPicture(recording, places(), width(), { moving: true }), "moving"), draw);

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => (steps && event.target.name === "step" ? steps.step() : draw()));
form.addEventListener("input", begin);
$("#play")?.addEventListener("click", steps.play);
box.addEventListener("click", (event) => {
  const rank = event.target.closest("[data-rank]")?.dataset.rank;
  if (rank === undefined) return;
  form.elements.rank.value = recording.fields.find(({ name }) => name === "rank").values.indexOf(Number(rank));
  draw();
  box.querySelector(`[data-rank="${rank}"]`).focus();
});
addEventListener("resize", draw);
draw();
