// The mesh: ranks in their nodes; one rank's groups.
import { $, fromLink, newest, onChange, say, settings, toLink } from "./common.js";
import { groupsHtml, named, nodesHtml } from "./pictures.mjs";

const form = $("#settings");

function show(answer) {
  if (answer.error) return say(answer.error, true);
  say("");
  $("#ranks").innerHTML = nodesHtml(answer);
  $("#rank").innerHTML = `<h3>${named(answer)}</h3>${groupsHtml(answer)}`;
  document.body.dataset.mesh = `${answer.world} ${answer.rank}`;
}

const meshes = newest("mesh", show);

$("#ranks").addEventListener("click", (event) => {
  const rank = event.target.closest("[data-rank]")?.dataset.rank;
  if (rank === undefined) return;
  form.elements.rank.value = rank;
  toLink(form);
  meshes(settings(form));
});
fromLink(form);
onChange(form, () => meshes(settings(form)));
if (!location.hash) show(JSON.parse($("#first-mesh").textContent)); // computed when the site was built: there before Python is
meshes(settings(form));
