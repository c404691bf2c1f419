// Collectives step by step, from recordings of real ranks; and the alpha-beta model's curves.
import { $, RANKS, escape, fill, fromLink, newest, number, onChange, say, settings } from "./common.js";

const form = $("#settings");
const model = $("#model");
const recordings = JSON.parse($("#recordings").textContent);
let playing = null;

function sizes() {
  const offered = Object.keys(recordings[form.elements.collective.value]);
  fill(form.elements.p, offered, offered.includes(form.elements.p.value) ? form.elements.p.value : offered.includes("4") ? "4" : offered[0]);
}

function statesOf(recording) {
  const states = [recording.start.map((items) => new Set(items.map(String)))];
  for (const step of recording.steps) {
    const next = states.at(-1).map((items) => new Set(items));
    for (const message of step) for (const item of message.items) next[message.to].add(String(item));
    states.push(next);
  }
  return states;
}

function draw() {
  const recording = recordings[form.elements.collective.value][form.elements.p.value];
  const slider = form.elements.step;
  slider.max = recording.steps.length;
  const at = Math.min(Number(slider.value), recording.steps.length);
  slider.value = at;
  const { p, chunks } = recording;
  const state = statesOf(recording)[at];
  const messages = at ? recording.steps[at - 1] : [];
  const cell = Math.max(10, Math.min(30, 560 / chunks));
  const tall = 30;
  const parts = [];
  for (let rank = 0; rank < p; rank++) {
    const y = 18 + rank * (tall + 12);
    parts.push(`<text x="0" y="${y + 20}">rank ${rank}</text>`);
    for (let c = 0; c < chunks; c++) {
      const x = 56 + c * (cell + 2);
      const held = Array.from({ length: p }, (_, r) => r).filter((r) => state[rank].has(`${c},${r}`));
      parts.push(`<rect x="${x}" y="${y}" width="${cell}" height="${tall}" class="${held.length === p ? "whole" : "cell"}"><title>chunk ${c} on rank ${rank}: parts of ranks ${held.join(", ") || "none"}</title></rect>`);
      held.forEach((r) => parts.push(`<rect x="${x}" y="${y + (r * tall) / p}" width="${cell}" height="${tall / p}" fill="${RANKS[r]}" pointer-events="none"/>`));
    }
  }
  const right = 66 + chunks * (cell + 2);
  for (const message of messages) {
    const [from, to] = [message.from, message.to].map((rank) => 18 + rank * (tall + 12) + tall / 2);
    const bend = 30 + 12 * Math.abs(message.from - message.to);
    parts.push(`<path class="message" d="M${right},${from} C${right + bend},${from} ${right + bend},${to} ${right},${to}" marker-end="url(#arrow)"/>`);
  }
  const sent = Array.from({ length: p }, (_, rank) => recording.steps.slice(0, at).flat().filter((m) => m.from === rank).reduce((sum, m) => sum + m.share, 0));
  const height = 26 + p * (tall + 12);
  $("#picture").innerHTML = `<svg viewBox="0 0 ${right + 130} ${height}" width="${Math.min(right + 130, 900)}" role="img" aria-label="who holds whose parts after step ${at}">
    <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8Z"/></marker></defs>${parts.join("")}</svg>
    <div class="scroll"><table><thead><tr><th>sent so far</th>${sent.map((_, rank) => `<th>rank ${rank}</th>`).join("")}</tr></thead><tbody><tr><td>of the vector</td>${sent.map((share) => `<td>${number(share)}</td>`).join("")}</tr></tbody></table></div>`;
  const what = messages.map((m) => `${m.from} to ${m.to}: ${new Set(m.items.map(([c]) => c)).size} of ${chunks} chunks`).join("; ");
  say(at ? `step ${at} of ${recording.steps.length}: ${what}` : `the start, before ${recording.steps.length} steps`);
  document.body.dataset.step = `${at} ${sent[0]}`;
}

const curves = newest("curves", (answer) => {
  if (answer.error) return say(answer.error, true);
  const { sizes: bytes, lines, crossovers } = answer;
  const [w, h, left] = [640, 300, 60];
  const all = Object.values(lines).flat();
  const [low, high] = [Math.log(Math.min(...all) || 1e-9), Math.log(Math.max(...all))];
  const x = (size) => left + ((Math.log(size) - Math.log(bytes[0])) / (Math.log(bytes.at(-1)) - Math.log(bytes[0]))) * (w - left - 10);
  const y = (s) => h - 30 - ((Math.log(s) - low) / (high - low || 1)) * (h - 45);
  const human = (size) => (size >= 2 ** 30 ? `${size / 2 ** 30} GiB` : size >= 2 ** 20 ? `${size / 2 ** 20} MiB` : `${size / 2 ** 10} KiB`);
  const time = (s) => (s >= 1 ? `${number(s)} s` : s >= 1e-3 ? `${number(s * 1e3)} ms` : `${number(s * 1e6)} us`);
  const dashes = ["", "7 4", "2 3"];
  const paths = Object.entries(lines).map(([label, values], i) => `<path class="curve" stroke="${["#0072b2", "#d55e00", "#009e73"][i]}" stroke-dasharray="${dashes[i]}" d="M${values.map((s, n) => `${x(bytes[n]).toFixed(1)},${y(s).toFixed(1)}`).join("L")}"><title>${escape(label)}</title></path>`);
  const marks = [2 ** 10, 2 ** 15, 2 ** 20, 2 ** 25, 2 ** 30].map((size) => `<text class="small" text-anchor="middle" x="${x(size)}" y="${h - 10}">${human(size)}</text>`);
  const times = [Math.min(...all), Math.max(...all)].map((s) => `<text class="small" x="0" y="${y(s) + 4}">${time(s)}</text>`);
  const turns = crossovers.map(([size, from, to]) => `<li>from ${human(2 ** Math.round(Math.log2(size)))} on, ${escape(to)} is faster than ${escape(from)}</li>`);
  const key = Object.keys(lines).map((label, i) => `<li><svg width="30" height="10"><path class="curve" stroke="${["#0072b2", "#d55e00", "#009e73"][i]}" stroke-dasharray="${dashes[i]}" d="M0,5H30"/></svg> ${escape(label)}</li>`);
  $("#curves").innerHTML = `<svg viewBox="0 0 ${w} ${h}" role="img" aria-label="seconds of an all-reduce by its size">${paths.join("")}${marks.join("")}${times.join("")}</svg><ul class="legend">${key.join("")}</ul><ul>${turns.join("") || "<li>no crossover: one algorithm is the fastest at every size</li>"}</ul>`;
});

fill(form.elements.collective, Object.keys(recordings), "all-reduce, ring");
sizes();
fromLink(form);
form.elements.collective.addEventListener("change", () => {
  form.elements.step.value = 0;
  sizes();
});
onChange(form, () => {
  sizes();
  draw();
});
draw();
$("#play").addEventListener("click", () => {
  const slider = form.elements.step;
  clearInterval(playing);
  if (Number(slider.value) >= Number(slider.max)) slider.value = 0;
  playing = setInterval(() => {
    slider.value = Number(slider.value) + 1;
    draw();
    if (Number(slider.value) >= Number(slider.max)) clearInterval(playing);
  }, 900);
});
onChange(model, () => curves(settings(model)));
curves(settings(model));
