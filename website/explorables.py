"""What a lesson's page has and its notebook has not: something to touch, and links from "Your turn" to its tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from urllib.parse import urlencode

from minipar.learn.exercises.registry import EXERCISES
from minipar.learn.puzzles.registry import PUZZLES

# lesson -> (what to do, the interactive page, its settings)
EXPLORABLES = {
    "01": ("Step through the ring", "collectives", {"collective": "all-reduce, ring", "p": 4, "step": 1}),
    "02": ("Send while you compute, in this browser", "puzzles", {"puzzle": "overlap"}),
    "03": ("Hold only your part, in this browser", "puzzles", {"puzzle": "zero2"}),
    "06": ("Drag actions of 1F1B", "pipeline", {"schedule": "1f1b", "beside": "gpipe", "p": 4, "m": 8}),
    "07": ("Drag the halves of a backward", "pipeline", {"schedule": "zb-h1", "beside": "1f1b", "p": 4, "m": 8}),
    "08": ("Step through an all-to-all", "collectives", {"collective": "all-to-all, pairwise", "p": 4, "step": 1}),
    "09": ("Pass keys and values around, in this browser", "puzzles", {"puzzle": "ring-attention"}),
    "10": ("Choose a rank, and see its groups", "mesh", {"pp": 2, "dp": 2, "tp": 4, "ranks_per_node": 8, "rank": 5}),
    "12": ("Plan a run: memory and time of every layout", "planner", {}),
    "17": ("Which mesh fits, and why not the others", "planner", {}),
    "23": ("Drag the units of V-Min", "pipeline", {"schedule": "v-min", "beside": "zb-v", "p": 4, "m": 8}),
}  # fmt: skip
# lessons that show the pipeline itself, and the schedule that it begins with
PIPELINES = {"06": "1f1b", "07": "zb-h1"}

BOX = """<div class="interactive home" markdown="0">
<p>Microbatches pass through the stages of a pipeline, forward in blue and back in orange. Hatched is
waiting. Move the sliders:</p>
<form id="settings" aria-label="The pipeline">
<label>schedule <select name="schedule">{options}</select></label>
<label class="slider">ranks <input name="p" type="range" min="0" max="4" value="2"><output></output></label>
<label class="slider">microbatches <input name="m" type="range" min="0" max="4" value="2"><output></output></label>
</form>
<p id="status" role="status" aria-live="polite"></p>
<div id="first" class="scroll"></div>
<noscript><p>The picture needs JavaScript. Everything else here is text, and so are the lessons.</p></noscript>
<script type="application/json" id="recorded">{recorded}</script>
<script type="module" src="{up}assets/home.js"></script>
</div>
"""


def pipeline_box(recorded: dict, first: str, up: str = "") -> str:
    """Return the pipeline with its sliders, which was simulated when the site was built. `up` leads to the site's root."""
    options = "".join(
        f'<option value="{name}"{" selected" * (name == first)}>{title}</option>'
        for name, title in recorded["names"].items()
    )
    return BOX.format(options=options, recorded=json.dumps(recorded, separators=(",", ":")), up=up)


def explorable(number: str, text: str, pictures: Callable[[], dict]) -> str:
    """Return a lesson's Markdown with its explorable before its first code or section, and links in "Your turn".

    number    the lesson's, "06"
    pictures  returns the timelines of the pipeline's sliders
    """
    if number in EXPLORABLES:
        title, page, settings = EXPLORABLES[number]
        link = f"../interactive/{page}.md" + (f"#{urlencode(settings)}" if settings else "")
        shown = f"**[{title}]({link})**\n{{ .play }}\n\n"
        if number in PIPELINES:
            shown = pipeline_box(pictures(), PIPELINES[number], "../") + "\n" + shown
        text = re.sub(r"^(## |```)", lambda found: shown + found[0], text, count=1, flags=re.MULTILINE)
    names = {exercise.name for exercise in EXERCISES}
    text = re.sub(
        r"`(minipar exercise start (\w+))`",
        lambda found: f"[{found[0]}](../exercises.md#{found[2]})" if found[2] in names else found[0],
        text,
    )
    puzzles = [
        f"[{one.title}](../interactive/puzzles.md#{urlencode({'puzzle': one.name})})"
        for one in PUZZLES.values()
        if one.lesson == number
    ]
    if puzzles:
        said = f"## Your turn\n\nIn this browser, with nothing to install: {', '.join(puzzles)}.\n"
        text = text.replace("## Your turn\n", said, 1)
    return text
