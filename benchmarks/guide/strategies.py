"""Write the strategy map, docs/generated/strategies.md: each strategy alone on eight ranks, with the same model and batch.

A row of strategies.toml names a layout. `minipar.cost` computes what is split, held and sent under that layout, and how
long ranks wait; `sends` is a formula for the bytes sent.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from minipar.cost.layout import Implementation, Job, Layout, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.models import expert_elems
from minipar.cost.ranks import ends_elems, held_by
from minipar.cost.timing import step_time
from minipar.cost.traffic import step_traffic
from minipar.learn.facts import quote

RANKS, SAMPLES, TOKENS = 8, 8, 4096
STATES = {"parameters": "parameters", "gradients": "gradients", "states": "optimizer state"}
LETTERS = (
    "n ranks; P parameters, E of them in embedding and head, X in experts; L layers of width D, keys and values of width "
    "K; N tokens in a step, over all ranks; k experts a token; s ranks in a group and r groups"
)


class Strategy(NamedTuple):
    """A strategy, and the layout that uses it alone.

    rank       the pp coordinate of the rank whose bytes are counted
    sends      the bytes that this rank sends in a step, as an expression in the letters of LETTERS
    when, saves, breaks   halves of sentences, which `_paragraph` completes
    where      the strategy's flags and its file
    lesson     file name of a notebook
    """

    name: str
    layout: str
    sends: str
    when: str
    saves: str
    breaks: str
    where: str
    lesson: str
    model: str = "llama-7b"
    rank: int = 0
    replicate: int = 1
    sequence_parallel: bool = True

    @property
    def split(self) -> Layout:
        return parse_layout(self.layout)

    def job(self, gpus: int = RANKS) -> Job:
        how = Implementation(replicate=self.replicate, sequence_parallel=self.sequence_parallel)
        return Job(MODELS[self.model], MACHINES["h100"], gpus, TOKENS, SAMPLES, implementation=how)

    def held_bytes(self) -> dict[str, float]:
        """Return the bytes of parameters, gradients, states and activations on the rank that holds most activations."""
        return held(self.job(), self.split)

    def parts(self) -> dict[str, float]:
        """Return the fraction of the batch, sequence, layers, experts and each kind of memory that a rank has.

        A fraction of memory is relative to a single GPU that runs the model alone.
        """
        job, a = self.job(), self.split
        tokens = a.cp * (a.tp if self.sequence_parallel else 1)
        layers = held_by(job, a, self.rank).num_layers / job.shape.num_layers
        alone = held(replace(self.job(1), implementation=Implementation()), Layout())
        of_memory = {name: num_bytes / alone[name] for name, num_bytes in self.held_bytes().items()}
        return {"batch": 1 / a.dp, "sequence": 1 / tokens, "layers": layers, "experts": 1 / a.ep} | of_memory

    def sent_bytes(self) -> float:
        """Return the bytes that the rank sends in a step, according to the planner."""
        return sum(sent.total for sent in step_traffic(self.job(), self.split, self.rank).values())

    def formula_bytes(self) -> float:
        """Return the value of `sends`."""
        job, shape, a = self.job(), MODELS[self.model], self.split
        ends = ends_elems(job, Layout(), held_by(job, Layout(), 0))
        letters = dict(
            n=RANKS, P=shape.num_params, E=ends, X=shape.num_moe_layers * shape.num_experts
            * expert_elems(shape), L=shape.num_layers, D=shape.dim, K=shape.kv_dim, N=SAMPLES * TOKENS, k=shape.top_k,
            s=a.dp // self.replicate, r=self.replicate,
        )  # fmt: skip
        return float(eval(self.sends, letters))


def held(job: Job, layout: Layout) -> dict[str, float]:
    """Return the bytes of parameters, gradients, states and activations on the first pipeline rank."""
    items = rank_memory(job, layout, 0)
    return {name: items[item] for name, item in STATES.items()} | {"activations": items["activations"]}


@cache
def strategies() -> tuple[Strategy, ...]:
    text = (files("benchmarks.guide") / "strategies.toml").read_text(encoding="utf-8")
    return tuple(Strategy(**quote(entry)) for entry in tomllib.loads(text)["strategy"])


COLUMNS = ("batch", "sequence", "layers", "experts", "parameters", "gradients", "states", "activations")


def page() -> str:
    """Return the text of docs/generated/strategies.md."""
    shape = MODELS["llama-7b"]
    lines = [
        "# The strategy map",
        "",
        "Which strategy splits what, what it sends, and where it breaks. Each is alone here, on the same "
        f"{RANKS} H100 of one node: Llama 2 7B ({shape.num_params / 1e9:.2f} B parameters), a step of {SAMPLES} samples of "
        f"{TOKENS:,} tokens, one sample at a time, 16 bits; expert parallelism has Mixtral 8x7B. Real runs combine them: "
        "[workloads](workloads.md) says how.",
        "",
        "![Bars of what one rank holds under each strategy, and of what it sends in a step](strategies.png)",
        "",
        "(`python -m minipar.visualize.strategies` draws this picture. A strategy need not fit a GPU to be in it.)",
        "",
        "## What a rank has",
        "",
        "The part of each thing that one rank has: 1 is all. For activations, 1 is what one sample leaves in all layers of "
        "one GPU. *Waits*: the part of a step in which ranks wait for messages or in a bubble.",
        "",
        f"| strategy | {' | '.join(COLUMNS)} | sends | waits |",
        "|---|" + "---|" * (len(COLUMNS) + 2),
        *map(_row, strategies()),
        "",
        "## One by one",
        "",
        f"Formulas are bytes that a rank sends in a step, at 2 bytes a number: {LETTERS}.",
        "",
    ]
    for strategy in strategies():
        lines += [_paragraph(strategy), ""]
    lines.append(
        "Written by `python -m benchmarks.guide docs/generated`; every number is computed by `minipar.cost`."
    )
    return "\n".join(lines) + "\n"


def _row(strategy: Strategy) -> str:
    step, parts = step_time(strategy.job(), strategy.split), strategy.parts()
    waits = (step.communication + step.parts["idle"]) / step.total
    cells = [part_text(parts[name]) for name in COLUMNS]
    return f"| {strategy.name} | {' | '.join(cells)} | {strategy.sent_bytes() / 1e9:.3g} GB | {waits:.0%} |"


def part_text(part: float) -> str:
    """Format a fraction: "1", "1/n" if it is close to such a fraction, else a percentage."""
    if abs(part - 1) < 0.01:
        return "1"
    whole = round(1 / part)
    return f"**1/{whole}**" if abs(part * whole - 1) < 0.01 else f"**{part:.0%}**"


def _paragraph(strategy: Strategy) -> str:
    sent = f"`{strategy.sends}` = {strategy.sent_bytes() / 1e9:.3g} GB"
    lesson = f"[lesson {strategy.lesson[:2]}](../../lessons/{strategy.lesson}.ipynb)"
    return (
        f"**{strategy.name}.** {strategy.where}, {lesson}. *Saves* {strategy.saves}. *Sends* {sent}, {strategy.when}. "
        f"*Breaks* where {strategy.breaks}."
    )
