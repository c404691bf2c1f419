// The pipeline explorer: Python simulates, this page draws.
import { $, ask, fill, fromLink, newest, onChange, save, say, settings, toLink } from "./common.js";
import { span, unitOf } from "./drawing.mjs";
import { timelineHtml } from "./pictures.mjs";
import { playTimelines } from "./moving.js";

const form = $("#settings");
const pictures = [
  { box: $("#first"), answer: null, orders: null, request: null, chosen: null },
  { box: $("#second"), answer: null, orders: null, request: null, chosen: null },
];

function requestOf(index) {
  const values = settings(form);
  const request = { ...values, orders: pictures[index].orders };
  if (index === 1) request.schedule = values.beside;
  return request;
}

const asks = pictures.map((picture, index) => newest("pipeline", (answer, request) => show(index, answer, request)));

// `quietly`: the picture is there already, and is only to be confirmed.
function refresh(quietly = false) {
  for (const picture of pictures) picture.orders = null;
  if (!quietly) say("computing ...");
  asks[0](requestOf(0));
  if (settings(form).beside) asks[1](requestOf(1));
  else {
    pictures[1].answer = null;
    pictures[1].box.innerHTML = "";
  }
}

let drawings = 0; // a request repeated shows as another drawing

function show(index, answer, request) {
  const picture = pictures[index];
  if (answer.error) {
    if (request.orders) picture.orders = picture.before ?? null;
    say(answer.error, true);
    mark(index, answer.blocked ?? []);
    return;
  }
  Object.assign(picture, { answer, request, before: request.orders });
  const ends = pictures.filter((p) => p.answer).map((p) => span(p.answer));
  for (const other of pictures) if (other.answer) draw(other, Math.max(...ends));
  say(request.orders ? "your order is valid" : "");
  document.body.dataset.drawn = `${answer.name} ${request.p} ${request.m} ${++drawings}`;
}

function mark(index, ranks) {
  for (const rank of ranks) $(`[data-row="${rank}"]`, pictures[index].box)?.classList.add("blocked");
}

// Drawing ----------------------------------------------------------------------------------------------------------------

function draw(picture, end) {
  const { answer, box } = picture;
  const critical = new Set(form.elements.critical.checked ? answer.critical.map(String) : []);
  const { html, placed } = timelineHtml(answer, Math.max(300, box.clientWidth || 900), end, critical);
  box.innerHTML = html;
  Object.assign(picture, placed);
  wire(picture);
}

// An action: what it needs, who waits for it; dragged, it makes one's own schedule ---------------------------------------

function boxOf(picture, rank, position) {
  return $(`[data-at="${rank},${position}"]`, picture.box);
}

// `hovering`: the pointer only passes by, which leaves an error on the status line where it is.
async function choose(picture, rank, position, hovering = false) {
  const own = picture.answer.ranks[rank];
  if (!own?.[position]) return;
  picture.chosen = [rank, position];
  const [op, stage, k] = own[position];
  const detail = await ask("action", { ...picture.request, action: [op, stage, k] });
  if (detail.error) return say(detail.error, true);
  if (hovering && $("#status").classList.contains("wrong")) return;
  for (const box of picture.box.querySelectorAll(".action")) box.classList.remove("chosen", "needed", "waiting");
  boxOf(picture, rank, position)?.classList.add("chosen");
  const places = new Map(picture.answer.ranks.flatMap((actions, r) => actions.map((a, i) => [a.slice(0, 3).join(","), [r, i]])));
  for (const [name, group] of [["needed", detail.needs], ["waiting", detail.waiting]]) {
    for (const action of group) boxOf(picture, ...places.get(action.join(",")))?.classList.add(name);
  }
  const unit = unitOf(picture.answer);
  const named = (actions) => actions.map(([o, s, n]) => `${o}${unit(n)} on stage ${s}`).join(", ") || "nothing";
  say(`${detail.text}; needs ${named(detail.needs)}; ${named(detail.waiting)} ${detail.waiting.length === 1 ? "waits" : "wait"} for it`);
}

function move(picture, rank, from, to) {
  const orders = picture.answer.ranks.map((own) => own.map((action) => action.slice(0, 3)));
  const [action] = orders[rank].splice(from, 1);
  orders[rank].splice(to, 0, action);
  picture.orders = orders;
  const index = pictures.indexOf(picture);
  picture.chosen = [rank, to];
  asks[index](requestOf(index));
}

function wire(picture) {
  const svg = $("svg", picture.box);
  let drag = null;
  const at = (event) => event.target.closest?.(".action")?.dataset.at.split(",").map(Number);
  svg.addEventListener("pointerover", (event) => {
    const place = at(event);
    if (place && !drag && event.pointerType === "mouse") choose(picture, ...place, true);
  });
  svg.addEventListener("pointerdown", (event) => {
    const place = at(event);
    if (!place) return;
    choose(picture, ...place);
    drag = { place, x: event.clientX };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (drag) boxOf(picture, ...drag.place)?.setAttribute("transform", `translate(${event.clientX - drag.x} 0)`);
  });
  svg.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const [rank, from] = drag.place;
    const moved = event.clientX - drag.x;
    drag = null;
    boxOf(picture, rank, from)?.removeAttribute("transform");
    if (Math.abs(moved) < 4) return;
    const own = picture.answer.ranks[rank];
    const time = (own[from][3] + own[from][4]) / 2 + moved / picture.scale;
    const to = own.filter((action, i) => i !== from && (action[3] + action[4]) / 2 < time).length;
    if (to !== from) move(picture, rank, from, to);
  });
  svg.addEventListener("keydown", (event) => {
    const [rank, position] = picture.chosen ?? [0, -1];
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const row = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step && event.shiftKey && position >= 0) {
      const to = position + step;
      if (to >= 0 && to < picture.answer.ranks[rank].length) move(picture, rank, position, to);
    } else if (step) {
      choose(picture, rank, Math.min(Math.max(position + step, 0), picture.answer.ranks[rank].length - 1));
    } else if (row) {
      const other = Math.min(Math.max(rank + row, 0), picture.answer.ranks.length - 1);
      choose(picture, other, Math.min(Math.max(position, 0), picture.answer.ranks[other].length - 1));
    } else if (event.key === "Escape") {
      picture.orders = null;
      asks[pictures.indexOf(picture)](requestOf(pictures.indexOf(picture)));
    } else {
      return;
    }
    event.preventDefault();
  });
}

function svgText() {
  const svg = $("svg", pictures[0].box).cloneNode(true);
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  svg.insertAdjacentHTML("afterbegin", "<style>text{font:11px sans-serif}.on{text-anchor:middle}.small{font-size:9px}.idle{fill:url(#hatch)}.live{fill:#0072b2;opacity:.5}</style>");
  return svg.outerHTML;
}

$("#play").addEventListener("click", () => playTimelines(pictures.filter((picture) => picture.answer)));
$("#reset").addEventListener("click", () => refresh());
$("#svg").addEventListener("click", () => save("timeline.svg", "image/svg+xml", svgText()));
$("#csv").addEventListener("click", () => {
  const { csv, no_csv } = pictures[0].answer;
  if (csv === null) say(no_csv, true);
  else save("schedule.csv", "text/csv", csv);
});
$("#link").addEventListener("click", async () => {
  toLink(form);
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  say(`copied: ${location.href}`);
});
addEventListener("resize", () => {
  const drawn = pictures.filter((p) => p.answer);
  for (const picture of drawn) draw(picture, Math.max(...drawn.map((p) => span(p.answer))));
});

const names = JSON.parse($("#schedules").textContent);
fill(form.elements.schedule, names, "1f1b");
fill(form.elements.beside, ["", ...names], "");
fromLink(form);
onChange(form, () => refresh());
const first = JSON.parse($("#first-picture").textContent);
if (!location.hash) show(0, first.answer, first.request); // computed when the site was built: there before Python is
refresh(!location.hash);
