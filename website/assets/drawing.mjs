// Drawing: from plain values to SVG as text. Runs in a browser and, when the site is built, in node.

export const COLOURS = {
  F: ["#aedcf4", "#000"],
  B: ["#d55e00", "#fff"],
  I: ["#e69f00", "#000"],
  W: ["#00614a", "#fff"],
  C: ["#aedcf4", "#000"],
  S: ["#cc79a7", "#000"],
  A: ["#cc79a7", "#000"],
};
export const RANKS = ["#56b4e9", "#d55e00", "#f0e442", "#0072b2", "#cc79a7", "#009e73", "#e69f00", "#9a9a9a", "#7f3c8d"];

export const escape = (text) =>
  String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);

export const number = (value) => (Math.abs(value) >= 1000 ? value.toFixed(0) : Number(value.toPrecision(4)).toString());
export const bytes = (value) => `${(value / 1e9).toFixed(value < 1e10 ? 2 : 1)} GB`;
export const percent = (value) => `${(100 * value).toFixed(1)} %`;

// The colour of part i of a bar.
const shade = (i) => RANKS[i % RANKS.length];

// A bar of {name: value}, one part beside the other, of which `most` is the whole width; `limit` is drawn as a line.
export function bar(parts, limit, unit, label, most) {
  let x = 0;
  const boxes = Object.entries(parts).map(([name, value], i) => {
    const width = (1000 * value) / most;
    const box = value > 0 ? `<rect x="${x}" y="4" width="${width}" height="32" fill="${shade(i)}" stroke="var(--page)"><title>${escape(name)}: ${unit(value)}</title></rect>` : "";
    x += width;
    return box;
  });
  const line = limit ? `<line x1="${(1000 * limit) / most}" x2="${(1000 * limit) / most}" y1="0" y2="40" stroke="var(--ink)" stroke-width="3" stroke-dasharray="5 3"/>` : "";
  return `<svg class="bar" viewBox="0 0 1000 40" preserveAspectRatio="none" role="img" aria-label="${escape(label)}">${boxes.join("")}${line}</svg>`;
}

export const total = (parts) => Object.values(parts).reduce((sum, value) => sum + value, 0);

// What the colours of `bar` mean: a list of the parts that are there.
export function legend(parts, unit) {
  const list = Object.entries(parts)
    .map(([name, value], i) => (value > 0 ? `<li><span class="swatch" style="background:${shade(i)}"></span>${escape(name)} <b>${unit(value)}</b></li>` : ""))
    .join("");
  return `<ul class="legend">${list}</ul>`;
}

export function stacked(parts, limit, unit, label) {
  const most = Math.max(total(parts), limit ?? 0) * 1.02 || 1;
  return bar(parts, limit, unit, label, most) + legend(parts, unit);
}

// A schedule's timeline -------------------------------------------------------------------------------------------------

const ROW = 26;
const LIVE = 14;
const MOST_TEXTS = 3000;

// Where samples are cut, unit k is slice k % slices of microbatch k / slices: "1.3".
export const unitOf = ({ slices }) => (k) => (slices > 1 ? `${Math.floor(k / slices)}.${k % slices}` : k);

export const span = (answer) => Math.max(...answer.ranks.flat().map((action) => action[4]), 1e-9);

// What a bar says before its number: a message is an arrow to a rank.
const SIGNS = { C: "", S: "→", A: "" };

// One row a rank (or as `answer.names` says) and, where `answer.live` is given, a row of the activations that it holds. `end` is the last time shown.
export function timeline(answer, width, end, label, critical = new Set()) {
  const left = Math.max(54, ...(answer.names ?? []).map((name) => 6.2 * name.length + 6));
  const scale = (width - left - 8) / end;
  const p = answer.ranks.length;
  const count = answer.ranks.reduce((sum, own) => sum + own.length, 0);
  const chunkOf = new Map();
  const seen = new Map();
  answer.stage_rank.forEach((rank, stage) => {
    chunkOf.set(stage, seen.get(rank) ?? 0);
    seen.set(rank, chunkOf.get(stage) + 1);
  });
  const unit = unitOf(answer);
  const many = new Set(answer.stage_rank).size < answer.stage_rank.length;
  const parts = [];
  const last = p * ROW + 8;
  for (let rank = 0; rank < p; rank++) {
    const y = rank * ROW + 4;
    parts.push(`<g data-row="${rank}"><rect class="idle" x="${left}" y="${y}" width="${end * scale}" height="${ROW - 4}"/><text x="0" y="${y + 15}">${escape(answer.names?.[rank] ?? `rank ${rank}`)}</text></g>`);
    answer.ranks[rank].forEach(([op, stage, k, start, stop], position) => {
      const [fill] = COLOURS[op];
      const w = Math.max((stop - start) * scale, 0.4);
      const inset = op === "W" ? 3 : 0;
      const critically = critical.has([op, stage, k].join(",")) ? " critical" : "";
      const text = count <= MOST_TEXTS && w > 11 ? `<text class="on" x="${left + start * scale + w / 2}" y="${y + 15}" fill="${COLOURS[op][1]}">${w > 24 ? (SIGNS[op] ?? op) : ""}${unit(k)}${many && w > 30 ? "abcdefgh"[chunkOf.get(stage)] : ""}</text>` : "";
      parts.push(`<g class="action${critically}" data-at="${rank},${position}"><rect x="${left + start * scale}" y="${y + inset}" width="${w}" height="${ROW - 4 - 2 * inset}" fill="${fill}"/>${text}</g>`);
    });
  }
  const most = Math.max(...answer.peak_live, 1);
  (answer.live ?? []).forEach((own, rank) => {
    const base = last + (rank + 1) * LIVE;
    const steps = own.map(([time, n]) => `H${left + time * scale}V${base - (n / most) * (LIVE - 3)}`).join("");
    parts.push(`<path class="live" d="M${left},${base}${steps}H${left + end * scale}V${base}Z"/><text class="small" x="0" y="${base - 2}">${answer.live_word ?? "live"} ${answer.peak_live[rank]}</text>`);
  });
  const height = last + (answer.live?.length ?? 0) * LIVE + 22;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => `<text class="small" text-anchor="${part === 1 ? "end" : "middle"}" x="${left + part * end * scale}" y="${height - 6}">${number(part * end)}</text>`);
  const svg = `<svg class="timeline" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" aria-label="${escape(label)}">
      <defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--idle, #dcdcdc)"/><line x1="0" y1="0" x2="0" y2="6" stroke="var(--idle-line, #f4f4f4)" stroke-width="3"/></pattern></defs>
      ${parts.join("")}${ticks.join("")}<line class="head" x1="${left}" x2="${left}" y1="0" y2="${last}" visibility="hidden"/></svg>`;
  return { svg, scale, left, end };
}
