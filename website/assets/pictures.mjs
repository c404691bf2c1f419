// The pictures of the explorables: from an answer and the reader's choices to {picture, text}, as HTML. Runs in a browser
// and, when the site is built, in node, so that a page has its first picture without JavaScript.
import { RANKS, bar, bytes, escape, legend, number, percent, span, timeline, total } from "./drawing.mjs";

const milliseconds = (value) => `${value.toFixed(1)} ms`;
export const seconds = (value) => `${value >= 10 ? value.toFixed(1) : value.toFixed(3)} s`;
const image = (svg) => svg.replace("<svg ", '<svg role="img" ');

// Pipelines: `end` is the last time on the axis, so that a shorter step is shorter on the page.
function pipeline(answer, { schedule, p, m }, width, { names, end }) {
  const held = Math.max(...answer.peak_live);
  const label = `${names[schedule]} on ${p} ranks, ${m} microbatches`;
  return {
    picture: image(timeline(answer, width, Math.max(end, span(answer)), label).svg),
    text: `<b>${names[schedule]}</b>, ${p} ranks, ${m} microbatches: a rank waits <b data-bubble="${answer.bubble_over_total}">${percent(answer.bubble_over_total)}</b> of the time, and holds up to <b>${held}</b> microbatches' activations.`,
    link: { schedule, p, m },
  };
}

// A timeline with its figures, as the pipeline's page shows it.
export function timelineHtml(answer, width, end, critical = new Set()) {
  const label = `Timeline of ${answer.name}, ${answer.ranks.length} ranks. Arrow keys choose an action, shift with left or right moves it, Escape undoes.`;
  const { svg, ...placed } = timeline(answer, width, end, label, critical);
  const shorter = answer.makespan > answer.own_span + 1e-9 ? ` (${number(answer.makespan)} from the first rank's start to the last one's end)` : "";
  const html = `
    <h3>${escape(answer.name)}: bubble <output data-bubble="${answer.bubble_over_total}">${percent(answer.bubble_over_total)}</output> of the time, ${percent(answer.bubble_over_ideal)} of useful time; a rank's step ${number(answer.own_span)}${shorter}, ideal ${number(answer.ideal)}; at most ${Math.max(...answer.peak_live)} activations on a rank</h3>
    ${svg.replace("<svg ", '<svg tabindex="0" role="application" ')}`;
  return { html, placed };
}

// A collective, step by step ---------------------------------------------------------------------------------------------

function statesOf(recording) {
  const states = [recording.start.map((items) => new Set(items.map(String)))];
  for (const step of recording.steps) {
    const next = states.at(-1).map((items) => new Set(items));
    for (const message of step) for (const item of message.items) next[message.to].add(String(item));
    states.push(next);
  }
  return states;
}

const LEFT = 50; // names of ranks
const RIGHT = 78; // arrows

// Where the chunks are, in a picture of this width.
function grid({ chunks, p }, width) {
  const cell = Math.min(64, (Math.min(width, 760) - LEFT - RIGHT) / chunks - 3);
  const tall = cell > 40 ? 36 : 30;
  return { cell, tall, at: (rank, chunk) => [LEFT + chunk * (cell + 3), 8 + rank * (tall + 12)], right: LEFT + chunks * (cell + 3), height: 8 + p * (tall + 12) };
}

const slices = (ranks, [x, y], { cell, tall }, p) =>
  ranks.map((r) => `<rect x="${x}" y="${y + (r * tall) / p}" width="${cell}" height="${tall / p}" fill="${RANKS[r]}" pointer-events="none"/>`).join("");

// What each rank holds after `step`. `moving`: before it, with the step's messages as groups that are to be moved by data-by.
export function collective(recording, { step }, width, { moving = false } = {}) {
  const { p, chunks, steps } = recording;
  const at = Math.min(Number(step), steps.length);
  const state = statesOf(recording)[moving ? at - 1 : at];
  const messages = at ? steps[at - 1] : [];
  const place = grid(recording, width);
  const parts = [];
  for (let rank = 0; rank < p; rank++) {
    parts.push(`<text x="0" y="${place.at(rank, 0)[1] + place.tall / 2 + 4}">rank ${rank}</text>`);
    for (let c = 0; c < chunks; c++) {
      const [x, y] = place.at(rank, c);
      const held = Array.from({ length: p }, (_, r) => r).filter((r) => state[rank].has(`${c},${r}`));
      const title = `chunk ${c} on rank ${rank}: parts of ranks ${held.join(", ") || "none"}`;
      parts.push(`<rect x="${x}" y="${y}" width="${place.cell}" height="${place.tall}" class="${held.length === p ? "whole" : "cell"}"><title>${title}</title></rect>${slices(held, [x, y], place, p)}`);
    }
  }
  for (const message of messages) {
    const ys = [message.from, message.to].map((rank) => place.at(rank, 0)[1] + place.tall / 2);
    const bend = place.right + 10 + (60 * Math.abs(message.from - message.to)) / p;
    parts.push(`<path class="message" d="M${place.right},${ys[0]} C${bend},${ys[0]} ${bend},${ys[1]} ${place.right + 1},${ys[1]}" marker-end="url(#arrow)"/>`);
    if (!moving) continue;
    const by = (message.to - message.from) * (place.tall + 12);
    for (const chunk of new Set(message.items.map(([c]) => c))) {
      const ranks = message.items.filter(([c]) => c === chunk).map(([, r]) => r);
      parts.push(`<g class="moving" data-by="${by}">${slices(ranks, place.at(message.from, chunk), place, p)}</g>`);
    }
  }
  const full = place.right + RIGHT;
  const sent = Array.from({ length: p }, (_, rank) => steps.slice(0, at).flat().filter((m) => m.from === rank).reduce((sum, m) => sum + m.share, 0));
  const what = messages.map((m) => `${m.from} to ${m.to}: ${new Set(m.items.map(([c]) => c)).size} of ${chunks} chunks`).join("; ");
  const least = number(Math.min(...sent));
  const most = number(Math.max(...sent));
  return {
    picture: `<svg viewBox="0 0 ${full} ${place.height}" width="${full}" height="${place.height}" role="img" aria-label="who holds whose parts after step ${at}">
    <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8Z"/></marker></defs>${parts.join("")}</svg>`,
    text: (at ? `step ${at} of ${steps.length}: ${what}.` : `The start, before ${steps.length} steps.`) + ` Sent so far by a rank: <b>${least === most ? least : `${least} to ${most}`}</b> of the vector.`,
    sent,
    most: { step: steps.length },
    link: { p, step: at },
  };
}

// Seconds of an all-reduce by its size, a curve for each algorithm.
export function raceHtml(answer) {
  const { sizes, lines, crossovers } = answer;
  const [w, h, left] = [640, 300, 60];
  const all = Object.values(lines).flat();
  const [low, high] = [Math.log(Math.min(...all) || 1e-9), Math.log(Math.max(...all))];
  const x = (size) => left + ((Math.log(size) - Math.log(sizes[0])) / (Math.log(sizes.at(-1)) - Math.log(sizes[0]))) * (w - left - 10);
  const y = (s) => h - 30 - ((Math.log(s) - low) / (high - low || 1)) * (h - 45);
  const human = (size) => (size >= 2 ** 30 ? `${size / 2 ** 30} GiB` : size >= 2 ** 20 ? `${size / 2 ** 20} MiB` : `${size / 2 ** 10} KiB`);
  const time = (s) => (s >= 1 ? `${number(s)} s` : s >= 1e-3 ? `${number(s * 1e3)} ms` : `${number(s * 1e6)} us`);
  const dashes = ["", "7 4", "2 3"];
  const paths = Object.entries(lines).map(([label, values], i) => `<path class="curve" stroke="${["#0072b2", "#d55e00", "#009e73"][i]}" stroke-dasharray="${dashes[i]}" d="M${values.map((s, n) => `${x(sizes[n]).toFixed(1)},${y(s).toFixed(1)}`).join("L")}"><title>${escape(label)}</title></path>`);
  const marks = [2 ** 10, 2 ** 15, 2 ** 20, 2 ** 25, 2 ** 30].map((size) => `<text class="small" text-anchor="middle" x="${x(size)}" y="${h - 10}">${human(size)}</text>`);
  const times = [Math.min(...all), Math.max(...all)].map((s) => `<text class="small" x="0" y="${y(s) + 4}">${time(s)}</text>`);
  const turns = crossovers.map(([size, from, to]) => `<li>from ${human(2 ** Math.round(Math.log2(size)))} on, ${escape(to)} is faster than ${escape(from)}</li>`);
  const key = Object.keys(lines).map((label, i) => `<li><svg width="30" height="10"><path class="curve" stroke="${["#0072b2", "#d55e00", "#009e73"][i]}" stroke-dasharray="${dashes[i]}" d="M0,5H30"/></svg> ${escape(label)}</li>`);
  return `<svg viewBox="0 0 ${w} ${h}" role="img" aria-label="seconds of an all-reduce by its size">${paths.join("")}${marks.join("")}${times.join("")}</svg><ul class="legend">${key.join("")}</ul><ul>${turns.join("") || "<li>no crossover: one algorithm is the fastest at every size</li>"}</ul>`;
}

// Buckets: the backward of one rank, and its gradients on the network.
function overlap(answer, { bucket, link }, width, { end }) {
  const exposed = answer.step_ms - answer.backward_ms;
  const busy = total(answer.ranks[1].map(([, , , begin, stop]) => stop - begin));
  return {
    picture: image(timeline(answer, width, Math.max(end, answer.step_ms), `backward and all-reduces, ${bucket} layers in a bucket`).svg),
    text: `${answer.ranks[1].length} buckets over ${link}: the step takes <b>${milliseconds(answer.step_ms)}</b>. Of ${milliseconds(busy)} on the network, <b>${milliseconds(exposed)}</b> are not hidden behind the backward.`,
  };
}

// Memory ---------------------------------------------------------------------------------------------------------------

function zero({ stages, card }, { ranks, model }) {
  const most = Math.max(card, ...stages.map(total)) * 1.02;
  const rows = stages.map((memory, stage) => {
    const held = total(memory);
    return `<div class="bar-row"><span>ZeRO ${stage}</span>${bar(memory, card, bytes, `memory under ZeRO ${stage}: ${bytes(held)}`, most)}<b class="${held > card ? "wrong" : ""}">${bytes(held)}</b></div>`;
  });
  const fits = stages.findIndex((memory) => total(memory) <= card);
  return {
    picture: rows.join("") + legend(Object.fromEntries(Object.keys(stages[0]).map((name) => [name, Math.max(...stages.map((memory) => memory[name]))])), () => ""),
    text: `${escape(model)} on ${ranks} ranks, one sample of 4,096 tokens each. Dashed: the card, ${bytes(card)}. ` + (fits < 0 ? "<b>No stage fits.</b>" : `<b>ZeRO ${fits}</b> is the first that fits.`),
  };
}

export function layoutHtml(answer) {
  const memory = total(answer.memory);
  const fits = memory <= answer.card;
  return `<p class="${fits ? "good" : "wrong"}">pp rank ${answer.fullest_pp_rank} is the fullest: ${bytes(memory)} of ${bytes(answer.card)}: ${fits ? "fits" : `${bytes(memory - answer.card)} too much`}</p>
    <p class="head">Memory</p>${bar(answer.memory, answer.card, bytes, "memory by kind, with the card as a dashed line", Math.max(memory, answer.card) * 1.02)}${legend(answer.memory, bytes)}
    <p class="head">A step</p>${bar(answer.parts, null, seconds, "time of a step by part", total(answer.parts) || 1)}${legend(answer.parts, seconds)}`;
}

function layout(answer, choice) {
  const { model = "llama-70b", machine = "a100-80gb", tp, pp, zero: stage = 1 } = choice;
  const sizes = { dp: 64 / (tp * pp), tp, pp };
  const named = `${model} on 64 x ${machine}, dp ${sizes.dp}, tp ${tp}, pp ${pp}, ZeRO ${stage}`;
  const link = { model, machine, ...sizes, zero: stage };
  if (answer.error) return { picture: "", text: `${named}: ${escape(answer.error)}`, link };
  return { picture: layoutHtml(answer), text: `${named}: <b>${seconds(answer.seconds)}</b> a step, MFU <b>${percent(answer.mfu)}</b>.`, link };
}

// The planner's answer.
export function planHtml(answer) {
  const rows = answer.best.map((best, i) => `<tr><td><button type="button" data-i="${i}">${escape(best.layout)}</button></td><td>${seconds(best.seconds)} ± ${Math.round(100 * best.doubt)} %</td><td>${bytes(total(best.memory))}</td><td>${percent(best.mfu)}</td></tr>`);
  const why = answer.why.map((r) => `<tr><td>${escape(r.axis)}=${escape(r.value)}</td><td>${escape(r.text)}</td></tr>`);
  const near = answer.near === 1 ? "No other layout is within 5 % of the fastest." :
    `${answer.near.toLocaleString("en")} layouts are within 5 % of the fastest, nearer than the model can tell: of each mesh the simplest, the simplest of all first.`;
  return `<p class="head">${escape(answer.job)}</p>
    <p>${near}</p>
    <div class="scroll"><table><thead><tr><th>layout</th><th>step</th><th>memory</th><th>MFU</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>
    <h3>Why not the others</h3><div class="scroll"><table><thead><tr><th>family</th><th>against the first</th></tr></thead><tbody>${why.join("")}</tbody></table></div>
    <h3>The commands of the first</h3><pre><code>${answer.commands.map(escape).join("\n")}</code></pre>`;
}

export const layoutTitle = (answer) => `${escape(answer.layout)}: ${seconds(answer.seconds)} a step, MFU ${percent(answer.mfu)}, HFU ${percent(answer.hfu)}`;

// Experts, and queries -------------------------------------------------------------------------------------------------

function loads({ load, capacity, dropped }, { balance, step, capacity: factor }, width) {
  const most = Math.max(...load, capacity) * 1.05;
  const [w, row, left] = [Math.min(width, 760), 24, 64];
  const scale = (w - left - 40) / most;
  const rows = load.map((n, e) => {
    const kept = Math.min(n, capacity);
    const y = e * row + 2;
    return `<text x="0" y="${y + 14}">expert ${e}</text><rect x="${left}" y="${y}" width="${kept * scale}" height="${row - 5}" fill="#0072b2"/><rect x="${left + kept * scale}" y="${y}" width="${(n - kept) * scale}" height="${row - 5}" fill="#d55e00"/><text x="${left + n * scale + 5}" y="${y + 14}">${n}</text>`;
  });
  const x = left + capacity * scale;
  const tokens = load.reduce((sum, n) => sum + n, 0);
  return {
    picture: `<svg viewBox="0 0 ${w} ${load.length * row + 4}" width="${w}" height="${load.length * row + 4}" role="img" aria-label="tokens by expert; ${dropped} of ${tokens} are dropped">${rows.join("")}<line x1="${x}" x2="${x}" y1="0" y2="${load.length * row}" stroke="var(--ink)" stroke-width="2" stroke-dasharray="5 3"/></svg>`,
    text: `${balance === "with" ? "With" : "Without"} the balance loss, after ${step} steps: each expert has room for <b>${capacity}</b> of ${tokens} tokens (${factor} times an even share). <b>${percent(dropped / tokens)}</b> find no room, in orange; the busiest expert has ${number((Math.max(...load) * load.length) / tokens)} even shares.`,
  };
}

function causal({ owner, work }, { layout: name, p }, width) {
  const right = Math.min(width, 640);
  const row = Math.min(8, (0.55 * right) / owner.length);
  const side = row * owner.length;
  const rows = owner.map((rank, query) => `<rect x="0" y="${query * row}" width="${(query + 1) * row}" height="${row - 1}" fill="${RANKS[rank]}"><title>query ${query} is on rank ${rank}, and sees ${query + 1} keys</title></rect>`);
  const most = Math.max(...work);
  const [from, tall] = [side + 16, side / work.length];
  const scale = Math.max(right - from - 88, 20) / most;
  const bars = work.map((n, rank) => `<rect x="${from}" y="${rank * tall + 3}" width="${n * scale}" height="${tall - 6}" fill="${RANKS[rank]}"/><text class="small" x="${from + n * scale + 4}" y="${rank * tall + tall / 2 + 4}">rank ${rank}: ${n}</text>`);
  const even = work.reduce((sum, n) => sum + n, 0) / work.length;
  return {
    picture: `<svg viewBox="0 0 ${right} ${side}" width="${right}" height="${side}" role="img" aria-label="${name}: the scores of each rank are ${work.join(", ")}">${rows.join("")}${bars.join("")}</svg>`,
    text: `${owner.length} queries, each of which sees the keys before it, in the colour of the rank that has it (left); scores computed by each rank (right). The layer takes as long as the busiest rank: <b>${number(most / even)}</b> times an even share.`,
  };
}

// The mesh ---------------------------------------------------------------------------------------------------------------

const AXES = ["tp", "cp", "dp", "pp", "ep", "edp"];
const colour = (axis) => RANKS[AXES.indexOf(axis)];
const dot = (axis, title = "") => `<span class="dot" style="background:${colour(axis)}"${title && ` title="${title}"`}></span>`;
const few = (ranks) => (ranks.length > 16 ? `${ranks.slice(0, 16).join(", ")} ... (${ranks.length})` : ranks.join(", "));

// The ranks as buttons, in their nodes; dots say in which of the chosen rank's groups each is.
export function nodesHtml(answer) {
  const nodes = [];
  for (let first = 0; first < answer.world; first += answer.ranks_per_node) {
    const ranks = [];
    for (let rank = first; rank < Math.min(first + answer.ranks_per_node, answer.world); rank++) {
      const at = answer.all_coordinates[rank];
      const place = ["pp", "dp", "cp", "tp"].map((axis) => `${axis} ${at[axis]}`).join(", ");
      const dots = AXES.filter((axis) => answer.groups[axis].length > 1 && answer.groups[axis].includes(rank) && (axis !== "edp" || answer.groups.ep.length > 1)).map((axis) => dot(axis, `${axis} group`));
      ranks.push(`<button type="button" class="rank${rank === answer.rank ? " chosen" : ""}" data-rank="${rank}" aria-pressed="${rank === answer.rank}" aria-label="rank ${rank}: ${place}"><b>${rank}</b>${dots.join("")}</button>`);
    }
    nodes.push(`<fieldset class="node"><legend>node ${first / answer.ranks_per_node}</legend>${ranks.join("")}</fieldset>`);
  }
  return nodes.join("");
}

export function groupsHtml(answer) {
  const rows = AXES.map((axis) => `<tr><td>${dot(axis)} ${axis}</td><td>${few(answer.groups[axis])}</td><td>${answer.groups[axis].length === 1 ? "nobody else" : answer.leaves_the_node[axis] ? "leaves the node" : "stays in the node"}</td></tr>`);
  return `<ul>${answer.holds.map((line) => `<li>${escape(line)}</li>`).join("")}</ul>
    <div class="scroll"><table><thead><tr><th>group</th><th>ranks</th><th>messages</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>
    <p>Gradients of everything but experts are summed over dp and cp: ranks ${few(answer.gradients)}. Those of experts over edp: ranks ${few(answer.expert_gradients)}.</p>`;
}

export const named = (answer) => `Rank ${answer.rank} of ${answer.world}: ${Object.entries(answer.coordinates).map(([axis, place]) => `${axis} ${place}`).join(", ")}`;

function mesh(answer, { mesh: name, rank }, width, { all_coordinates: coordinates }) {
  const whole = { ...answer, all_coordinates: coordinates[name] };
  const sizes = Object.fromEntries(name.split(", ").map((part) => part.split(" ")));
  const alone = { pp: 1, dp: 1, cp: 1, tp: 1, ep: 1 };
  return { picture: nodesHtml(whole) + groupsHtml(whole), text: `${named(answer)}.`, link: { ...alone, ...sizes, rank } };
}

export const PICTURES = { pipeline, collective, overlap, zero, layout, loads, causal, mesh };

// The recorded picture at these places of the fields' values.
export function recordedPicture({ kind, fields, answers, constants }, places, width, more = {}) {
  const keys = fields.filter((field) => field.is_key).map((field) => places[field.name]);
  const choice = Object.fromEntries(fields.map((field) => [field.name, field.values[places[field.name]]]));
  // All answers that differ only in the first field share one axis of time.
  const alike = Object.entries(answers).filter(([key]) => key.split(" ").slice(1).join(" ") === keys.slice(1).join(" "));
  const end = ["pipeline", "overlap"].includes(kind) ? Math.max(...alike.map(([, answer]) => span(answer))) : 0;
  return PICTURES[kind](answers[keys.join(" ")], choice, width, { ...constants, end, ...more });
}
