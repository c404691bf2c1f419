// Answers from the network and, where there is none, from what was kept. Python's files bear their version, so those that
// are kept are taken at once. SITE is this build; the caches of other builds are deleted.
const SITE = "SITE_DIGEST";
const PYTHON = "PYODIDE_VERSION";
const TEXTS = ALL_TEXTS;

const cacheOf = (url) => caches.open(url.includes("/assets/pyodide/") ? PYTHON : SITE);

async function kept(url) {
  return (await cacheOf(url)).match(url, { ignoreSearch: true });
}

async function keep(url, answer) {
  if (answer.ok && answer.type === "basic") await (await cacheOf(url)).put(url, answer);
}

async function answer(request) {
  const url = request.url.split("#")[0];
  if (url.includes("/assets/pyodide/")) {
    const found = await kept(url);
    if (found) return found;
  }
  try {
    const fresh = await fetch(request);
    await keep(url, fresh.clone());
    return fresh;
  } catch (error) {
    const found = (await kept(url)) ?? (request.mode === "navigate" && (await kept(url.replace(/\/?$/, "/index.html"))));
    if (found) return found;
    throw error;
  }
}

async function add(urls) {
  for (const url of urls) {
    if (await kept(url)) continue;
    await fetch(url, { cache: "force-cache" }).then((fresh) => keep(url, fresh)).catch(() => {});
  }
}

addEventListener("install", () => skipWaiting());
addEventListener("activate", (event) =>
  event.waitUntil(
    (async () => {
      for (const name of await caches.keys()) if (![SITE, PYTHON].includes(name)) await caches.delete(name);
      await clients.claim();
    })(),
  ),
);
addEventListener("fetch", (event) => {
  const { method, url, headers } = event.request;
  if (method === "GET" && url.startsWith(registration.scope) && !headers.has("range")) event.respondWith(answer(event.request));
});
// Pages send what they had loaded before this worker was there. All texts follow, without pictures and Python.
addEventListener("message", (event) =>
  event.waitUntil(add([...event.data, ...(navigator.connection?.saveData ? [] : TEXTS.map((page) => new URL(page, registration.scope).href))])),
);
