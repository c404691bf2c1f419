// Interview cards, one at a time. What was missed comes again; without JavaScript the page is a list to unfold.
import { $, fromLink, onChange, say, settings } from "./common.js";

const form = $("#settings");
const cards = [...document.querySelectorAll("details.card")];
const names = new Set(cards.map((card) => card.id));
const KEY = "minipar.quiz";
const LATER = 4; // a missed question comes again after so many others
const record = kept(); // id -> {asked, missed in a row}, as minipar quiz keeps it
let queue = []; // the cards still to be asked; the first is shown

function kept() {
  const read = {};
  try {
    for (const [id, { asked, missed }] of Object.entries(JSON.parse(localStorage.getItem(KEY)) ?? {})) {
      if (names.has(id) && asked >= 0 && missed >= 0) read[id] = { asked, missed };
    }
  } catch {
    // No storage, or not ours: nothing has been missed yet.
  }
  return read;
}

function keep() {
  try {
    localStorage.setItem(KEY, JSON.stringify(record));
  } catch {
    // The browser keeps nothing: the record lasts as long as the page.
  }
}

const of = (card) => record[card.id] ?? { asked: 0, missed: 0 };
const chapter = () => form.elements.chapter.value;
const chosen = () => cards.filter((card) => !chapter() || card.dataset.chapter === chapter());

// Missed questions, then new ones, then the rest, each shuffled.
function ordered() {
  const drawn = chosen().map((card) => [card, Math.random()]);
  return drawn.sort(([a, x], [b, y]) => of(b).missed - of(a).missed || of(a).asked - of(b).asked || x - y).map(([card]) => card);
}

function begin() {
  queue = ordered();
  show();
}

function show() {
  const listed = settings(form).list;
  const [now] = queue;
  $(".practice").classList.toggle("listed", Boolean(listed));
  for (const section of document.querySelectorAll("section.chapter")) section.hidden = Boolean(chapter()) && section.dataset.chapter !== chapter();
  for (const card of cards) {
    card.classList.toggle("now", card === now);
    if (!listed) for (const one of [card, $("details", card)]) one.open = false;
  }
  $("#keys").hidden = Boolean(listed) || !now;
  judge();
  const missed = chosen().filter((card) => of(card).missed).length;
  const state = `${chosen().length} questions, ${missed} missed the last time`;
  say(listed ? state : now ? `${now.dataset.level}. ${queue.length} to go; ${state}` : `All of them had. ${state}`);
  if (!listed && !now) queue = ordered();
  document.body.dataset.card = listed || !now ? "" : now.id;
}

// The verdict is asked for once the answer is there to compare with.
function judge() {
  $("#judge").hidden = Boolean(settings(form).list) || !$("details.now[open]");
}

function answered(right) {
  const card = queue.shift();
  const { asked, missed } = of(card);
  record[card.id] = { asked: asked + 1, missed: right ? 0 : missed + 1 };
  if (!right) queue.splice(LATER, 0, card);
  keep();
  show();
  $("details.now > summary")?.focus();
}

for (const card of cards) card.addEventListener("toggle", judge);
$("#had").addEventListener("click", () => answered(true));
$("#missed").addEventListener("click", () => answered(false));
$("#forget").addEventListener("click", () => {
  for (const id of Object.keys(record)) delete record[id];
  keep();
  begin();
});
addEventListener("keydown", (event) => {
  const now = $("details.now");
  if (!now || settings(form).list || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  if (event.key === "r") {
    const next = now.open ? $("details", now) : now;
    next.open = true;
    $("summary", next).focus();
  } else if (now.open && (event.key === "1" || event.key === "2")) answered(event.key === "1");
});

fromLink(form);
onChange(form, begin);
begin();
