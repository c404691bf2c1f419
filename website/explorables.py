"""What a lesson's page has and its notebook has not: something to touch, and links from "Your turn" to its tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple
from urllib.parse import urlencode

from minipar.learn.exercises.registry import EXERCISES
from minipar.learn.puzzles.registry import PUZZLES
from website import lesson_pictures as pictures
from website.lesson_pictures import Field, Recording


class Explorable(NamedTuple):
    """A lesson's explorable: what it says first, what it shows, and which interactive page leads further, as set here."""

    say: str
    recording: Callable[[], Recording]
    further: str
    page: str
    settings: dict[str, Any] = {}
    first: dict[str, Any] = {}  # first choices that are other than the recording's


PIPELINE = "Microbatches pass through the stages, forward in blue and back in orange. Hatched is waiting."
EXPLORABLES = {
    "01": Explorable(
        "Each colour is one rank's part. A chunk with every colour, framed, is done. Recorded on real ranks.",
        pictures.ring, "Other collectives, step by step", "collectives", {"collective": "all-reduce, ring"},
    ),
    "02": Explorable(
        "Twelve layers' backward, from the last to the first, and their gradients on the network, in buckets.",
        pictures.buckets, "Write it yourself: a puzzle", "puzzles", {"puzzle": "overlap"},
    ),
    "03": Explorable(
        "Each stage cuts one more kind of state over the ranks.",
        pictures.zero, "Write ZeRO-2 yourself: a puzzle", "puzzles", {"puzzle": "zero2"},
    ),
    "06": Explorable(
        PIPELINE, pictures.pipelines, "Drag actions, change costs, compare schedules", "pipeline", {"beside": "gpipe"},
    ),
    "07": Explorable(
        "A backward in two halves: in orange what the stage before waits for, in green what can wait.",
        pictures.pipelines, "Drag the halves of a backward", "pipeline", {"beside": "1f1b"}, {"schedule": "zb-h1"},
    ),
    "08": Explorable(
        "How many tokens choose each expert while a small model trains, and how many find no room.",
        pictures.experts, "Step through the all-to-all that carries them", "collectives",
        {"collective": "all-to-all, pairwise", "p": 4, "step": 1},
    ),
    "09": Explorable(
        "A sequence on several ranks, under a causal mask: late queries see more keys.",
        pictures.zigzag, "Write ring attention yourself: a puzzle", "puzzles", {"puzzle": "ring-attention"},
    ),
    "10": Explorable(
        "Sixteen ranks in two nodes. Choose one: a dot marks who is in a group with it, in the group's colour.",
        pictures.meshes, "Any mesh, any rank", "mesh", {"ranks_per_node": 8},
    ),
    "12": Explorable(
        "Llama 70B on 64 GPUs of 80 GB, dp = 64 / (tp pp). What fits, and what is a step made of?",
        pictures.before_you_pay, "Search all layouts in the planner", "planner",
    ),
    "17": Explorable(
        "One job on 64 GPUs, and which mesh? dp = 64 / (tp pp), under ZeRO-1.",
        pictures.which_mesh, "Which is the fastest, and why not the others?", "planner",
    ),
    "23": Explorable(
        PIPELINE, pictures.pipelines, "Drag the units of V-Min", "pipeline",
        {"schedule": "v-min", "beside": "zb-v", "p": 4, "m": 8},
    ),
}  # fmt: skip

HOME = Explorable(
    PIPELINE,
    pictures.pipelines,
    "Make it your own: drag actions, change costs, compare schedules",
    "pipeline",
)

BOX = """<div class="interactive explorable" markdown="0">
<p>{say}</p>
<form id="settings" aria-label="{label}">
{fields}
</form>
<div id="first" class="scroll" data-picture></div>
<p id="status" role="status" aria-live="polite" data-text></p>
<p class="further"><a id="more" href="{href}#{settings}" data-settings="{settings}">{further}</a></p>
<noscript><p>Sliders and menus need JavaScript; the picture and the text do not.</p></noscript>
<script type="application/json" id="recorded">{recorded}</script>
<script type="module" src="{up}assets/explorable.js"></script>
</div>
"""


def explorable_box(one: Explorable, up: str = "") -> str:
    """Return the HTML of an explorable, without its first picture. `up` leads to the site's root."""
    made = one.recording()
    fields = tuple(f.at_value(one.first[f.name]) if f.name in one.first else f for f in made.fields)
    controls = [_control(field) for field in fields]
    if made.kind == "collective":
        controls.append('<button id="play" type="button">Play</button>')
    plain = made._asdict() | {"fields": [field._asdict() for field in fields]}
    return BOX.format(
        say=one.say,
        label=escape(f"Choices: {', '.join(field.label for field in fields)}"),
        fields="\n".join(controls),
        href=f"{up}interactive/{one.page}.html",
        settings=escape(urlencode(one.settings)),
        further=one.further,
        recorded=json.dumps(plain, separators=(",", ":")).replace("</", "<\\/"),
        up=up,
    )


def _control(field: Field) -> str:
    said = [str(value) for value in field.labels or field.values]
    if field.is_menu:
        options = "".join(
            f'<option value="{i}"{" selected" * (i == field.at)}>{escape(text)}</option>'
            for i, text in enumerate(said)
        )
        return (
            f'<label>{field.label} <select name="{field.name}" autocomplete="off">{options}</select></label>'
        )
    return (
        f'<label class="slider">{field.label} <input name="{field.name}" type="range" min="0" max="{len(said) - 1}" '
        f'value="{field.at}" autocomplete="off"><output>{escape(said[field.at])}</output></label>'
    )


def explorable(number: str, text: str) -> str:
    """Return a lesson's Markdown with its explorable before its first code or section, imports folded, and tasks linked.

    number    the lesson's, "06"
    """
    text = _imports_folded(text)
    if number in EXPLORABLES:
        shown = explorable_box(EXPLORABLES[number], "../")
        found = re.search(r"^(## |```|<details)", text, flags=re.MULTILINE)
        at = found.start() if found else len(text)
        text = f"{text[:at]}{shown}\n{text[at:]}"
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


def _imports_folded(text: str) -> str:
    """Fold the lesson's first cell of imports away, so that the page begins with the lesson."""
    found = re.search(r"^```python\n(?:import|from) .*?^```\n", text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        return text
    folded = f'<details class="imports" markdown="1">\n<summary>Imports and settings</summary>\n\n{found[0]}\n</details>\n'
    return text[: found.start()] + folded + text[found.end() :]
