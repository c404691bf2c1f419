// What has been seen stays readable without a network: the worker keeps every page, script and picture that was loaded.
const root = new URL("..", import.meta.url);

async function keep() {
  await navigator.serviceWorker.register(new URL("offline-worker.js", root));
  const { active } = await navigator.serviceWorker.ready;
  // This first page was loaded before the worker was there.
  const loaded = [location.href, ...performance.getEntriesByType("resource").map((entry) => entry.name)];
  active.postMessage(loaded.filter((url) => url.startsWith(root.href)));
}

// After the page is there, so that it takes nothing from it.
const begin = () => setTimeout(() => keep().catch(() => {}), 4000);
if (navigator.serviceWorker && location.protocol !== "file:") {
  if (document.readyState === "complete") begin();
  else addEventListener("load", begin);
}
