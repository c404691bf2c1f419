// What the interactive pages share: asking Python, a form whose settings are the page's link, and drawing SVG.

export const COLOURS = {
  F: ["#aedcf4", "#000"],
  B: ["#d55e00", "#fff"],
  I: ["#e69f00", "#000"],
  W: ["#00614a", "#fff"],
};
export const RANKS = ["#56b4e9", "#d55e00", "#f0e442", "#0072b2", "#cc79a7", "#009e73", "#e69f00", "#9a9a9a"];

export const $ = (selector, within = document) => within.querySelector(selector);

// Python -------------------------------------------------------------------------------------------------------------

let worker;
const pending = new Map();
let asked = 0;

function python() {
  if (worker) return worker;
  worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.ready) return document.body.setAttribute("data-python", "ready");
    if (data.failed) return failed(data.failed);
    pending.get(data.id)?.(data.answer);
    pending.delete(data.id);
  };
  worker.onerror = (event) => failed(event.message || "the browser refused to start it");
  return worker;
}

function failed(reason) {
  document.body.setAttribute("data-python", "failed");
  say(`Python did not start in this page: ${reason}`, true);
}

export function ask(name, request) {
  const id = ++asked;
  return new Promise((resolve) => {
    pending.set(id, resolve);
    python().postMessage({ id, name, request });
  });
}

// Only the newest of several requests is sent on, once the one before has been answered.
export function newest(name, draw) {
  let busy = false;
  let next = null;
  async function run(request) {
    busy = true;
    draw(await ask(name, request), request);
    busy = false;
    if (next) {
      const later = next;
      next = null;
      run(later);
    }
  }
  return (request) => {
    if (busy) next = request;
    else run(request);
  };
}

// A line for the reader, read out by a screen reader; an error keeps the picture that was there.
export function say(text, wrong = false) {
  const line = $("#status");
  line.textContent = text;
  line.classList.toggle("wrong", wrong);
}

// Forms ----------------------------------------------------------------------------------------------------------------

export function settings(form) {
  const values = {};
  for (const field of form.elements) {
    if (field.name) values[field.name] = field.type === "checkbox" ? field.checked : field.value;
  }
  return values;
}

export function fromLink(form) {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const field = form.elements[name];
    if (!field) continue;
    if (field.tagName === "SELECT" && ![...field.options].some((option) => option.value === value)) {
      say(`${name}=${value} is not one of the choices: ${[...field.options].map((o) => o.value).join(", ")}`, true);
    } else {
      field.value = value;
    }
  }
}

export function toLink(form) {
  const given = Object.entries(settings(form)).filter(([, value]) => value !== "");
  history.replaceState(null, "", `#${new URLSearchParams(given)}`);
}

export function onChange(form, act) {
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    toLink(form);
    act();
  });
  addEventListener("hashchange", () => {
    fromLink(form);
    act();
  });
}

export function fill(select, names, chosen) {
  select.innerHTML = names.map((name) => `<option value="${name}"${name === chosen ? " selected" : ""}>${name || "nothing"}</option>`).join("");
}

// Drawing --------------------------------------------------------------------------------------------------------------

export const escape = (text) =>
  String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);

export function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export const number = (value) => (Math.abs(value) >= 1000 ? value.toFixed(0) : Number(value.toPrecision(4)).toString());
export const bytes = (value) => `${(value / 1e9).toFixed(value < 1e10 ? 2 : 1)} GB`;
export const percent = (value) => `${(100 * value).toFixed(1)} %`;

// A stacked bar of {name: value}, as SVG with a list beside it; `limit` is drawn as a line.
export function stacked(parts, limit, unit, label) {
  const entries = Object.entries(parts).filter(([, value]) => value > 0);
  const total = entries.reduce((sum, [, value]) => sum + value, 0);
  const most = Math.max(total, limit ?? 0) * 1.02 || 1;
  let x = 0;
  const boxes = entries.map(([name, value], i) => {
    const width = (1000 * value) / most;
    const box = `<rect x="${x}" y="4" width="${width}" height="32" fill="${RANKS[i % RANKS.length]}" stroke="var(--page)"><title>${escape(name)}: ${unit(value)}</title></rect>`;
    x += width;
    return box;
  });
  const line = limit ? `<line x1="${(1000 * limit) / most}" x2="${(1000 * limit) / most}" y1="0" y2="40" stroke="var(--ink)" stroke-width="3" stroke-dasharray="5 3"/>` : "";
  const list = entries
    .map(([name, value], i) => `<li><span class="swatch" style="background:${RANKS[i % RANKS.length]}"></span>${escape(name)} <b>${unit(value)}</b></li>`)
    .join("");
  return `<svg class="bar" viewBox="0 0 1000 40" preserveAspectRatio="none" role="img" aria-label="${escape(label)}">${boxes.join("")}${line}</svg><ul class="legend">${list}</ul>`;
}
