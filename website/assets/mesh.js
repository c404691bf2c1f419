// The mesh: ranks in their nodes; one rank's groups.
import { $, RANKS, escape, fromLink, newest, onChange, say, settings, toLink } from "./common.js";

const form = $("#settings");
const KINDS = ["tp", "cp", "dp", "pp", "ep", "edp"];
const colour = (axis) => RANKS[KINDS.indexOf(axis)];

function show(answer) {
  if (answer.error) return say(answer.error, true);
  say("");
  const groupsOf = (rank) => KINDS.filter((axis) => answer.groups[axis].length > 1 && answer.groups[axis].includes(rank));
  const nodes = [];
  for (let first = 0; first < answer.world; first += answer.ranks_per_node) {
    const ranks = [];
    for (let rank = first; rank < Math.min(first + answer.ranks_per_node, answer.world); rank++) {
      const at = answer.all_coordinates[rank];
      const place = ["pp", "dp", "cp", "tp"].map((axis) => `${axis} ${at[axis]}`).join(", ");
      const dots = groupsOf(rank).map((axis) => `<span class="dot" style="background:${colour(axis)}" title="${axis} group"></span>`).join("");
      ranks.push(`<button type="button" class="rank${rank === answer.rank ? " chosen" : ""}" data-rank="${rank}" aria-pressed="${rank === answer.rank}" aria-label="rank ${rank}: ${place}"><b>${rank}</b>${dots}</button>`);
    }
    nodes.push(`<fieldset class="node"><legend>node ${first / answer.ranks_per_node}</legend>${ranks.join("")}</fieldset>`);
  }
  $("#ranks").innerHTML = nodes.join("");
  for (const button of $("#ranks").querySelectorAll("button")) {
    button.addEventListener("click", () => {
      form.elements.rank.value = button.dataset.rank;
      toLink(form);
      meshes(settings(form));
    });
  }
  const list = (ranks) => (ranks.length > 16 ? `${ranks.slice(0, 16).join(", ")} ... (${ranks.length})` : ranks.join(", "));
  const rows = KINDS.map((axis) => `<tr><td><span class="dot" style="background:${colour(axis)}"></span> ${axis}</td><td>${list(answer.groups[axis])}</td><td>${answer.groups[axis].length === 1 ? "nobody else" : answer.leaves_the_node[axis] ? "leaves the node" : "stays in the node"}</td></tr>`);
  const at = Object.entries(answer.coordinates).map(([axis, place]) => `${axis} ${place}`).join(", ");
  $("#rank").innerHTML = `<h3>Rank ${answer.rank} of ${answer.world}: ${escape(at)}</h3><ul>${answer.holds.map((line) => `<li>${escape(line)}</li>`).join("")}</ul>
    <div class="scroll"><table><thead><tr><th>group</th><th>ranks</th><th>messages</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>
    <p>Gradients of everything but experts are summed over dp and cp: ranks ${list(answer.gradients)}. Those of experts over edp: ranks ${list(answer.expert_gradients)}.</p>`;
  document.body.dataset.mesh = `${answer.world} ${answer.rank}`;
}

const meshes = newest("mesh", show);

fromLink(form);
onChange(form, () => meshes(settings(form)));
if (!location.hash) show(JSON.parse($("#first-mesh").textContent)); // computed when the site was built: there before Python is
meshes(settings(form));
