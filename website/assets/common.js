// What the interactive pages share: asking Python, and a form whose settings are the page's link.

export const $ = (selector, within = document) => within.querySelector(selector);

// Python -------------------------------------------------------------------------------------------------------------

let worker;
const pending = new Map();
let asked = 0;

function python() {
  if (worker) return worker;
  worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.ready) {
      // Python is kept for the next time, with or without a network.
      navigator.serviceWorker?.ready.then(({ active }) => active.postMessage(data.loaded));
      return document.body.setAttribute("data-python", "ready");
    }
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
  for (const answered of pending.values()) answered({ error: `Python did not start in this page: ${reason}` });
  pending.clear();
}

// Start Python; resolve to whether it is there.
export async function started() {
  await ask("choices", {});
  return document.body.dataset.python === "ready";
}

// Python begins when the page is there, and takes nothing from it before.
const loaded = new Promise((resolve) => {
  const idle = () => (window.requestIdleCallback ?? setTimeout)(resolve, { timeout: 1500 });
  if (document.readyState === "complete") idle();
  else addEventListener("load", idle);
});

export function ask(name, request) {
  const id = ++asked;
  return new Promise((resolve) => {
    pending.set(id, resolve);
    loaded.then(() => pending.has(id) && python().postMessage({ id, name, request }));
  });
}

// End whatever Python is doing, and start it anew; what was asked is answered with an error.
export function restart(reason) {
  worker?.terminate();
  worker = undefined;
  document.body.removeAttribute("data-python");
  for (const answered of pending.values()) answered({ error: reason });
  pending.clear();
  python();
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
  form.addEventListener("input", (event) => {
    toLink(form);
    act(event);
  });
  addEventListener("hashchange", () => {
    fromLink(form);
    act();
  });
}

export function fill(select, names, chosen) {
  select.innerHTML = names.map((name) => `<option value="${name}"${name === chosen ? " selected" : ""}>${name || "nothing"}</option>`).join("");
}

export function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
