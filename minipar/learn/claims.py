"""Write docs/claims.md: claims that are widely repeated, each with the computation that finds it right or wrong.

    python -m minipar.learn.claims docs/claims.md

Verdicts are not stored: a claim's condition `holds` is evaluated for the computed value. All other figures of the page are
computed, too, except those inside the claims.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from minipar.cost import activations, collectives, links, memory, models, serving, stages, traffic
from minipar.cost.layout import Implementation, Job, Layout
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS, gpt
from minipar.schedules import gpipe, one_f_one_b, simulate

KINDS = ("paper", "tutorial", "documentation", "data sheet", "code")
_H100, _A100 = MACHINES["h100"], MACHINES["a100-80gb"]
_PLAIN = Implementation(sequence_parallel=False)
# The values that an expression may use, besides functions of the library.
VALUES: dict[str, Any] = dict(
    H100=_H100,
    A100=_A100,
    GPT3=MODELS["gpt3-175b"],
    LLAMA7=MODELS["llama-7b"],
    TRILLION=gpt("1T", 128, 25600, 160),
    J70=Job(MODELS["llama-70b"], _A100, 64, 4096, 1024),
    JPLAIN=Job(MODELS["llama-70b"], _H100, 64, 4096, 64, implementation=_PLAIN),
    JSEQ=Job(MODELS["llama-70b"], _H100, 64, 4096, 64),
    JLONG=Job(MODELS["llama-7b"], _H100, 64, 65536, 64),
    JTOP1=Job(replace(MODELS["mixtral-8x7b"], top_k=1), _H100, 8, 4096, 8),
    JTOP2=Job(MODELS["mixtral-8x7b"], _H100, 8, 4096, 8),
)
MEANING = {
    "H100, A100": "machines of minipar's table, an H100 and an A100 of 80 GB",
    "GPT3, LLAMA7, TRILLION": "model shapes: GPT-3, Llama 2 7B, Megatron's of 10^12 parameters",
    "J70": "Llama 2 70B on 64 A100, 1,024 samples of 4,096 tokens a step",
    "JSEQ, JPLAIN": "Llama 2 70B on 64 H100, with sequence parallelism and without",
    "JLONG": "Llama 2 7B on 64 H100, samples of 65,536 tokens",
    "JTOP1, JTOP2": "Mixtral 8x7B on 8 H100, one expert a token and two",
}
_MODULES = (activations, collectives, links, memory, models, serving, stages, traffic)
_FUNCTIONS: dict[str, Any] = {
    name: value
    for module in _MODULES
    for name, value in vars(module).items()
    if callable(value) and name.islower() and not name.startswith("_")
} | dict(Layout=Layout, gpipe=gpipe, one_f_one_b=one_f_one_b, simulate=simulate, sum=sum, abs=abs)


class Claim(NamedTuple):
    """A claim that others make, and how it is checked here.

    said    the claim, in our words
    kind    the kind of source that makes such a claim: one of KINDS
    value   an expression in functions of minipar.cost and minipar.schedules, and in VALUES
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
        return float(eval(self.value, dict(_FUNCTIONS | VALUES)))

    def is_right(self) -> bool:
        return bool(eval(self.holds, {"x": self.computed(), "abs": abs}))


@cache
def claims() -> tuple[Claim, ...]:
    entries = tomllib.loads((files("minipar.learn") / "claims.toml").read_text(encoding="utf-8"))["claim"]
    return tuple(Claim(**entry) for entry in entries)


def page() -> str:
    """Return the text of docs/claims.md."""
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
    parts += [f"| `{name}` | {what} |" for name, what in MEANING.items()]
    parts += [
        "",
        "Functions are those of `minipar.cost` and `minipar.schedules`.",
        "Written by `python -m minipar.learn.claims docs/claims.md`.",
    ]
    return "\n".join(parts) + "\n"


def _row(claim: Claim) -> str:
    file, _, name = claim.test.partition("::")
    x = claim.computed() * (100 if claim.unit == "%" else 1)
    shown = f"{x:,.0f}" if x >= 999.5 else f"{x:.3g}"
    verdict = f"**{'right' if claim.is_right() else 'wrong'}**: {claim.because}"
    test = f"[`{name}`](../{file})"
    computed = f"{shown} {claim.unit}: `{claim.value}`; claimed: `{claim.holds}`; {test}"
    return f"| {claim.said} ({claim.kind}) | {verdict} | {computed} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
