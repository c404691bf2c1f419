// Python in the page: Pyodide with minipar's torch-free packages. Answers {id, name, request} with {id, answer}.
import { loadPyodide } from "./pyodide/pyodide.mjs";

async function start() {
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  const library = await fetch(new URL("./minipar.zip", import.meta.url));
  python.unpackArchive(await library.arrayBuffer(), "zip", { extractDir: "/minipar" });
  python.runPython("import sys; sys.path.insert(0, '/minipar')");
  return python.runPython("from website.answers import answer; answer");
}

const ready = start();
ready.then(
  () => postMessage({ ready: true, loaded: performance.getEntriesByType("resource").map((entry) => entry.name) }),
  (error) => postMessage({ failed: String(error) }),
);
onmessage = async ({ data: { id, name, request } }) => {
  const answer = await ready;
  try {
    postMessage({ id, answer: JSON.parse(answer(name, JSON.stringify(request))) });
  } catch (error) {
    postMessage({ id, answer: { error: `minipar failed: ${error}` } });
  }
};
