"""Facts: numbers and formulas that several texts state. Each has one home, an entry of facts.toml, which computes it.

A text that is data quotes a fact by its name: `{fact:NAME}` becomes the number when the page is made, `{fact:NAME:.1f}`
the same number in another format. A cell of a lesson asserts its number. Pages written by hand and docstrings write it;
tests/learn/test_facts.py finds it there by the fact's phrases, and compares.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from inspect import isfunction
from typing import Any, NamedTuple, TypeVar

from minipar.cost.layout import Implementation, Job, Layout
from minipar.cost.machines import MACHINES, Machine
from minipar.cost.memory import model_state_bytes
from minipar.cost.model_table import MODELS
from minipar.cost.models import ModelShape
from minipar.cost.traffic import step_traffic
from minipar.learn.expressions import FUNCTIONS, VALUES
from minipar.support.errors import one_of

# Seconds of NCCL's LL, its protocol for short messages, over NVLink: src/graph/tuning.cc
NCCL_LL_START, NCCL_LL_HOP = 6.6e-6, 0.6e-6

# Functions of facts -------------------------------------------------------------------------------------------------
# A fact that is an expression of functions of minipar.cost needs none here.


def states_gb(num_params: float, ranks: int = 1, zero: int = 0) -> float:
    """Return the GB of parameters, gradients and Adam's states that a rank holds, in mixed precision."""
    return model_state_bytes(num_params, ranks, zero) / 1e9


def selective_part(num_tokens: int, width: int, num_layers: int, vocab_size: int) -> float:
    """Return the operations that selective recomputation adds, as a part of all (arXiv:2205.05198, section 5)."""
    again = num_tokens / (6 * width)
    return again / (1 + again + vocab_size / (12 * num_layers * width))


def node_bytes_per_s(machine: Machine) -> float:
    """Return the bandwidth out of a node for a group with a member on each GPU: all cards', at most one GPU's links'."""
    return min(machine.link_bytes_per_s, machine.cards_per_node * machine.card_bytes_per_s)


def tp_layer_bytes(width: int, t: int) -> float:
    """Return the bytes that a rank sends for a token in a layer: four all-reduces of the hidden state in 16 bits."""
    return 4 * 2 * (t - 1) / t * width * 2


def tp_waits_s(tp: int) -> float:
    """Return the seconds a step that tp's messages take, without latency, in lesson 17's job: 7B on 64 H100."""
    machine = MACHINES["h100"]
    plain = Implementation(sequence_parallel=False)
    job = Job(MODELS["llama-7b"], machine, 64, 4096, 64, implementation=plain)
    rate = machine.link_bytes_per_s if tp <= machine.gpus_per_node else node_bytes_per_s(machine)
    return step_traffic(job, Layout(dp=64 // tp, tp=tp), 0)["tp"].total / rate


def layer_compute_us(machine: Machine, width: int, t: int) -> float:
    """Return the microseconds of a token's matrix products in a layer of 12 h^2 weights, forward and backward."""
    return 1e6 * 6 * 12 * width**2 / t / (machine.peak_flops * machine.matmul_fraction)


def tokens_that_hide_a_ring(
    flops_per_s: float, bytes_per_s: float, kv_part: float = 1.0, halves: int = 1
) -> float:
    """Return the tokens a rank from which attention with a block takes as long as sending the next one.

    kv_part  key/value heads over query heads        halves  2 where a causal mask in zigzag leaves half of a block
    """
    return halves * kv_part * flops_per_s / bytes_per_s


def microbatches_for(bubble: float, p: int) -> int:
    """Return the fewest microbatches with which p stages are idle for at most this part of the time."""
    return next(m for m in range(1, 100_000) if (p - 1) / (m + p - 1) <= bubble)


def short_all_reduces_s(shape: ModelShape, hops: int) -> float:
    """Return the seconds for which a decode step over tp waits for its all-reduces, two per layer of this many hops."""
    return 2 * shape.num_layers * (NCCL_LL_START + hops * NCCL_LL_HOP)


_OWN = {name: f for name, f in list(vars().items()) if isfunction(f) and f.__module__ == __name__}
# What an expression in facts.toml may name.
NAMES: dict[str, Any] = FUNCTIONS | VALUES | _OWN

# Entries ------------------------------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """A number or a formula.

    says     what it is, in a sentence
    value    an expression of the functions above and of the names in expressions.py
    form     how the number is written: a format, as `written` takes it, or several; the first is that of `{fact:NAME}`
    phrases  how a text that cannot quote it writes it: {} stands for the number, # for any other number
    letters  only for a formula: the letters in `value`, and the name that texts use for each
    at       only for a formula: values of the letters, at which a formula in a text must give the same result as `value`
    """

    name: str
    says: str
    value: str
    form: str | list[str] = ".3g"
    phrases: tuple[str, ...] = ()
    letters: Mapping[str, str] = {}
    at: tuple[Mapping[str, float], ...] = ()

    @property
    def forms(self) -> list[str]:
        return [self.form] if isinstance(self.form, str) else self.form

    def computed(self, **letters: float) -> float:
        return float(eval(self.value, NAMES | letters))

    def quoted(self, form: str = "") -> str:
        return written(self.computed(), form or self.forms[0])


def written(value: float, form: str) -> str:
    """Format a number by a Python format spec; "~3" gives a whole number of three significant digits."""
    if form.startswith("~"):
        return format(float(format(value, f".{form[1:]}g")), ",.0f")
    return format(value, form)


@cache
def facts() -> dict[str, Fact]:
    """Return all facts by name."""
    entries = tomllib.loads((files("minipar.learn") / "facts.toml").read_text(encoding="utf-8"))["fact"]
    return {entry["name"]: Fact(**entry) for entry in entries}


# Quoting ------------------------------------------------------------------------------------------------------------

T = TypeVar("T")


def quote(text: T) -> T:
    """Put in the facts that a text quotes; in a list or a table, those of all its texts.

    Raises ValueError, with the nearest names, for a fact that does not exist.
    """
    filled: Any = text
    if isinstance(text, str):
        filled = re.sub(r"\{fact:(\w+)(?::([^{}]+))?\}", _quoted, text)
    elif isinstance(text, list):
        filled = [quote(item) for item in text]
    elif isinstance(text, dict):
        filled = {quote(key): quote(value) for key, value in text.items()}
    result: T = filled
    return result


def _quoted(found: re.Match[str]) -> str:
    name, form = found.groups()
    if name not in facts():
        raise ValueError(
            f"fact={name} is not in facts.toml; use {one_of(get_close_matches(name, facts(), 3, 0))}"
        )
    return facts()[name].quoted(form or "")
