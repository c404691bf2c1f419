"""Write docs/generated/claims.md: claims that are widely repeated, each with the computation that finds it right or wrong.

    python -m benchmarks.guide.claims docs/generated/claims.md

Verdicts are not stored: a claim's condition `holds` is evaluated for the computed value. All other figures of the page are
computed, too, except those inside the claims.
"""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from minipar.learn.expressions import FUNCTIONS, MEANING, VALUES
from minipar.learn.facts import quote

KINDS = ("paper", "tutorial", "documentation", "data sheet", "code")


class Claim(NamedTuple):
    """A claim that others make, and how it is checked here.

    said    the claim, in our words
    kind    the kind of source that makes such a claim: one of KINDS
    value   an expression in the names of expressions.py
    unit    the unit of the value; "%" multiplies it by 100
    holds   a condition on the value x, which is true if the claim is right
    because a sentence that says what is true
    test    FILE::NAME of the test that checks the computation
    """

    topic: str
    said: str
    kind: str
    value: str
    unit: str
    holds: str
    because: str
    test: str

    def computed(self) -> float:
        return float(eval(self.value, dict(FUNCTIONS | VALUES)))

    def is_right(self) -> bool:
        return bool(eval(self.holds, {"x": self.computed(), "abs": abs}))


@cache
def claims() -> tuple[Claim, ...]:
    entries = tomllib.loads((files(__package__) / "claims.toml").read_text(encoding="utf-8"))["claim"]
    return tuple(Claim(**quote(entry)) for entry in entries)


def page() -> str:
    """Return the text of docs/generated/claims.md."""
    right = sum(claim.is_right() for claim in claims())
    parts = [
        "# Claims, computed",
        "",
        f"{len(claims())} numbers that are widely repeated, in papers, tutorials and documentation: {right} right, "
        f"{len(claims()) - right} wrong. Each is computed",
        "by the functions with which minipar plans. The verdict is what the computation says: `claimed` is a condition on "
        "the value x.",
        "A test holds this page to the code, and each row names the test that holds its computation.",
        "",
    ]
    for topic in dict.fromkeys(claim.topic for claim in claims()):
        parts += [f"## {topic}", "", "| claim | verdict | computed |", "|---|---|---|"]
        parts += [_row(claim) for claim in claims() if claim.topic == topic]
        parts.append("")
    parts += ["## The values that expressions name", "", "| name | what it is |", "|---|---|"]
    named = " ".join(claim.value for claim in claims())
    parts += [
        f"| `{name}` | {what} |"
        for name, what in MEANING.items()
        if re.search(rf"\b{name.split(',')[0]}\b", named)
    ]
    parts += [
        "",
        "Functions are those of `minipar.cost` and `minipar.schedules`.",
        "Written by `python -m benchmarks.guide.claims docs/generated/claims.md`.",
    ]
    return "\n".join(parts) + "\n"


def _row(claim: Claim) -> str:
    file, _, name = claim.test.partition("::")
    x = claim.computed() * (100 if claim.unit == "%" else 1)
    shown = f"{x:,.0f}" if x >= 999.5 else f"{x:.3g}"
    verdict = f"**{'right' if claim.is_right() else 'wrong'}**: {claim.because}"
    test = f"[`{name}`](../../{file})"
    computed = f"{shown} {claim.unit}: `{claim.value}`; claimed: `{claim.holds}`; {test}"
    return f"| {claim.said} ({claim.kind}) | {verdict} | {computed} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
