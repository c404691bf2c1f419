// Puzzles: an editor, and Python in the page, which runs the program on a simulated network.
import { $, ask, fromLink, restart, say, settings, toLink } from "./common.js";
import { escape, span, timeline } from "./drawing.mjs";
import { playTimelines } from "./moving.js";

const form = $("#settings");
const editor = form.elements.program;
const puzzles = new Map(JSON.parse($("#stubs").textContent).map((puzzle) => [puzzle.name, puzzle]));
const LONGEST_MS = 15000; // of a loop inside one line, which Python does not interrupt
let wrong = 0; // tries at this puzzle
let running = false;
let shown = null; // the last picture

// Drafts, and which puzzles are solved, stay in this browser where it allows that.
function kept(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(`minipar.puzzles.${key}`, value);
    return localStorage.getItem(`minipar.puzzles.${key}`);
  } catch {
    return null;
  }
}

// The list and the chosen puzzle ----------------------------------------------------------------------------------------

const chosen = () => form.elements.puzzle.value;

function list() {
  $("#list").innerHTML = [...puzzles.values()]
    .map((puzzle, i) => `<button type="button" data-name="${puzzle.name}" aria-pressed="${puzzle.name === chosen()}">${i + 1}. ${escape(puzzle.title)}${kept(`${puzzle.name}.solved`) ? ' <span class="good">solved</span>' : ""}</button>`)
    .join("");
}

// `program`: from a link; otherwise the draft of last time, or the stub.
function choose(name, program) {
  form.elements.puzzle.value = name;
  for (const section of document.querySelectorAll("section.puzzle")) section.classList.toggle("chosen", section.id === `puzzle-${name}`);
  const section = $(`#puzzle-${name}`);
  section.insertBefore($("#work"), $("details", section));
  section.insertBefore($("#found"), $("details", section));
  editor.value = program || kept(name) || puzzles.get(name).stub;
  wrong = 0;
  clear();
  list();
  say("");
}

function clear() {
  $("#figures").innerHTML = $("#picture").innerHTML = "";
  $("#printed").hidden = true;
  shown = null;
  mark(null);
}

// The editor ---------------------------------------------------------------------------------------------------------------

function mark(line) {
  const count = editor.value.split("\n").length;
  editor.rows = Math.max(count, 8);
  $("#lines").innerHTML = Array.from({ length: count }, (_, i) => (i + 1 === line ? `<b class="wrong">${i + 1}</b>` : i + 1)).join("\n");
  editor.style.setProperty("--line", line ?? "");
  editor.classList.toggle("marked", line !== null);
  if (line) document.body.dataset.line = line;
  else delete document.body.dataset.line;
}

function insert(text) {
  editor.setRangeText(text, editor.selectionStart, editor.selectionEnd, "end");
  editor.dispatchEvent(new Event("input", { bubbles: true }));
}

let leaving = false; // Escape was pressed: the next Tab moves on
editor.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  else if (event.key === "Tab" && !leaving && !event.shiftKey) insert("    ");
  else if (event.key === "Enter") {
    const before = editor.value.slice(0, editor.selectionStart).split("\n").at(-1);
    insert(`\n${before.match(/^ */)[0]}${before.trimEnd().endsWith(":") ? "    " : ""}`);
  } else {
    leaving = event.key === "Escape";
    return;
  }
  event.preventDefault();
});
editor.addEventListener("input", () => {
  kept(chosen(), editor.value);
  mark(null);
});

// The verdict --------------------------------------------------------------------------------------------------------------

async function run() {
  if (running) return;
  const name = chosen();
  running = true;
  toLink(form);
  clear();
  say(document.body.dataset.python === "ready" ? "running ..." : "Python is starting ...");
  $("#stop").hidden = false;
  const asked = ask("puzzle", settings(form));
  const timer = document.body.dataset.python === "ready" && setTimeout(() => restart("stopped: a loop inside one line never ended"), LONGEST_MS);
  const answer = await asked;
  clearTimeout(timer);
  running = false;
  $("#stop").hidden = true;
  if (name === chosen()) show(name, answer);
}

function show(name, answer) {
  document.body.dataset.verdict = `${name} ${answer.right ? "right" : "wrong"} ${Number(document.body.dataset.verdict?.split(" ")[2] ?? 0) + 1}`;
  if (answer.error) return say(answer.error, true);
  wrong += answer.right ? 0 : 1;
  const where = answer.line ? `Line ${answer.line}: ` : "";
  const help = wrong >= 3 && !answer.right ? " The hints below, and the known answer, may help." : "";
  say(`${where}${answer.text}${answer.text.endsWith("?") ? "" : "."}${help}`, !answer.right);
  $("#status").classList.toggle("good", answer.right);
  mark(answer.line);
  $("#figures").innerHTML = answer.figures.map((figure) => `<li>${escape(figure)}</li>`).join("");
  $("#printed").hidden = !answer.printed.length;
  $("#printed").textContent = answer.printed.join("\n");
  shown = answer.picture;
  draw();
  if (answer.right) kept(`${name}.solved`, "yes");
  list();
}

function draw() {
  if (!shown) return;
  const box = $("#picture");
  const { svg, scale, end } = timeline(shown, Math.max(300, box.clientWidth || 900), span(shown), "What each rank computes and sends");
  box.innerHTML = `<h3>Milliseconds: computing, messages (→ to whom), memory in MB</h3><p><button id="play" type="button">Play</button></p>${svg.replace("<svg ", '<svg role="img" ')}`;
  $("#play").addEventListener("click", () => playTimelines([{ box, answer: shown, scale, end }]));
}

form.addEventListener("submit", (event) => event.preventDefault());
$("#list").addEventListener("click", (event) => {
  const name = event.target.closest("button")?.dataset.name;
  if (!name) return;
  choose(name);
  history.replaceState(null, "", `#puzzle=${name}`);
});
$("#run").addEventListener("click", run);
$("#stop").addEventListener("click", () => restart("stopped"));
$("#again").addEventListener("click", () => {
  editor.value = puzzles.get(chosen()).stub;
  editor.dispatchEvent(new Event("input", { bubbles: true }));
  clear();
  say("");
});
$("#link").addEventListener("click", async () => {
  toLink(form);
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  say("copied: the link holds your program");
});
addEventListener("resize", draw);
addEventListener("hashchange", open);

// A program that came with the link is shown, and is only read, not run.
async function open() {
  editor.value = "";
  fromLink(form);
  const [name, program] = [chosen(), editor.value];
  choose(puzzles.has(name) ? name : "naive", program);
  if (!puzzles.has(name)) return say(`puzzle=${name} is not one of the puzzles: ${[...puzzles.keys()].join(", ")}`, true);
  if (!program) return;
  say("This program came with the link. Nothing has been run.");
  const answer = await ask("read", { program });
  if (editor.value !== program || running || $("#figures").innerHTML) return;
  if (answer.error || answer.text) {
    say(`${answer.line ? `Line ${answer.line}: ` : ""}${answer.error ?? answer.text}. The program came with the link. Nothing has been run.`, true);
    mark(answer.line ?? null);
  }
}

open();
ask("puzzle", { puzzle: "naive", program: "" }); // starts Python
