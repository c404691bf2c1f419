"""A job (model, machine, batch) and its layout over ranks, and which layouts are legal."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache
from math import gcd
from operator import attrgetter
from typing import Any, Literal

from minipar.config.context_limits import ATTENTIONS
from minipar.config.rules import (
    EXPERTS,
    SAMPLES,
    STAGES,
    TENSOR,
    TOKENS,
    WHOLE_GROUPS,
    Rule,
    View,
    broken,
    divides,
    samples_of_rank,
    say,
)
from minipar.cost.machines import Machine
from minipar.cost.models import ModelShape
from minipar.cost.stages import FORMS, enough_microbatches, unplanned
from minipar.schedules.registry import SCHEDULES, chunks_per_rank
from minipar.support.errors import one_of, require_positive

AXES = ("dp", "pp", "cp", "ep", "tp")
PARTIAL = ("acts", "ops")  # recomputations of parts of a layer, which some programs have (activations.py)


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of weights, gradients and optimizer state (including master weights); bytes per activation."""

    weight: int
    gradient: int
    state: int
    activation: int


# mixed: fp16 or bf16 with fp32 master weights and Adam, 2 + 2 + 12 bytes as in the ZeRO paper. mixed-fp32-grads:
# 2 + 4 + 12 bytes, as in Megatron-LM.
PRECISIONS = {
    "mixed": Precision(2, 2, 12, 2),
    "mixed-fp32-grads": Precision(2, 4, 12, 2),
    "float32": Precision(4, 4, 8, 4),
    "float64": Precision(8, 8, 16, 8),
}


@dataclass(frozen=True)
class Implementation:
    """Properties of the training program that runs a layout. The defaults are minipar's.

    attention          "flash": scores are not stored, and the causal mask halves their work; "dense": all scores are
                       computed and stored; "fused": torch's kernels, like flash, but with a stored mask if samples
                       are cut into slices; "cudnn": flash at the rate of cuDNN's kernel, as with Transformer Engine
    overlap_gradients  gradients are reduced during the last microbatch's backward; otherwise after it
    overlap_params     ZeRO-1 and -2 gather updated parameters during the first microbatch's forward; otherwise before it
    sequence_parallel  outside the split matrices, tokens are split over tp wherever tp > 1
    reduce_every       "microbatch": ZeRO-2 reduces gradients after each microbatch, and a rank keeps only its shard
    reduce_bytes       bytes of a gradient while it is summed over ranks; 0: those in which it is stored, as in the papers'
                       volumes. minipar's trainer sums 16-bit gradients in 4 unless it is told otherwise
    replicate          hybrid sharding: number of groups of the dp x cp ranks that each hold all shards of ZeRO-3
    bucket_mb          megabytes (2**20 bytes) of gradients in a bucket; None: 40 million elements, or a million for each
                       data-parallel rank if that is more, as Megatron Core chooses so that latencies stay small
    bucket_layers      each layer's gradients are a bucket with every ZeRO stage, not with 3 alone; `bucket_mb` is ignored
    cp_ulysses         number of ranks in a Ulysses group, with cp_attention="usp"
    group_tokens       tokens that the router handles as one group, which cp must not cut; None: a sample
    fused              norms and SwiGLU are fused, so that a layer keeps less
    partial            the recomputations of PARTIAL that the program has
    fold_experts       experts are spread over tp, too, and none is split (Megatron Core's --expert-tensor-parallel-size 1):
                       ep divides dp x cp x tp, and each tp rank dispatches its own tokens
    once_per_rank      a row goes to each rank and each other node once, however many of its experts are there (DeepEP)
    adjacent_experts   a token's experts are neighbours, as those of a benchmark's router; otherwise they are any
    overlap_tp         sums over tp are cut up and sent beside the products that make or use them
    arithmetic         factor on the times of arithmetic that the formulas of work.py give
    attention_speed    rate of the program's attention kernel, as a multiple of the machine's attention_fraction

    The last two are numbers of a program, fitted to published runs (programs.py). cp_ulysses changes bytes sent and memory;
    the predicted time ignores it.
    """

    attention: Literal["flash", "fused", "dense", "cudnn"] = "flash"
    overlap_gradients: bool = True
    overlap_params: bool = False
    sequence_parallel: bool = True
    reduce_every: Literal["step", "microbatch"] = "step"
    reduce_bytes: int = 0
    replicate: int = 1
    bucket_mb: float | None = None
    bucket_layers: bool = False
    cp_ulysses: int = 1
    group_tokens: int | None = None
    fused: bool = False
    partial: tuple[str, ...] = ()
    fold_experts: bool = False
    once_per_rank: bool = False
    adjacent_experts: bool = False
    overlap_tp: bool = False
    arithmetic: float = 0.95
    attention_speed: float = 1.0


@dataclass(frozen=True, eq=False)
class Job:
    """A training job to plan: model, machine and batch. Jobs are compared by identity, so that cache lookups are fast.

    seq_len       tokens per sample    batch  samples per step, over all ranks
    margin_bytes  memory of each GPU that a plan leaves free: for fragmentation, and for memory that no formula counts
    program       the name of the training program that `implementation` describes (programs.py); "": no known program

    Raises ValueError for a size below 1 or an unknown precision.
    """

    shape: ModelShape
    machine: Machine
    gpus: int
    seq_len: int
    batch: int
    precision: str = "mixed"
    implementation: Implementation = Implementation()
    margin_bytes: float = 0.0
    program: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.margin_bytes < self.machine.memory_bytes:
            memory = self.machine.memory_bytes / 1e9
            raise ValueError(
                f"margin={self.margin_bytes / 1e9:g} GB of {memory:g} GB; use 0 or more, less than the memory"
            )
        require_positive(gpus=self.gpus, seq=self.seq_len, batch=self.batch)
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision={self.precision!r} is unknown; use {one_of(PRECISIONS, near=self.precision)}"
            )

    @property
    def room_bytes(self) -> float:
        """The memory of a GPU that a layout may fill."""
        return self.machine.memory_bytes - self.margin_bytes

    @property
    def bytes_of(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def reduced_bytes(self) -> int:
        """The bytes of a gradient while it is summed over ranks."""
        return self.implementation.reduce_bytes or self.bytes_of.gradient


@dataclass(frozen=True, order=True)
class Layout:
    """The split of a job over ranks. Its fields are the flags of `minipar train`, but `microbatch` is samples in each."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    microbatch: int = 1
    recompute: str = "none"
    cp_attention: str = "ring"

    @property
    def unit(self) -> int:
        """The number of layers that are recomputed together: 1 with "full", N with "every:N", otherwise 0."""
        return 1 if self.recompute == "full" else int(self.recompute.partition(":")[2] or 0)

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def with_order(self, zero: int, schedule: str, chunks: int) -> Layout:
        """Return this layout with the given ZeRO stage, schedule and chunks."""
        return Layout(
            self.dp, self.pp, self.cp, self.ep, self.tp, zero, schedule, chunks, self.microbatch, self.recompute,
            self.cp_attention,
        )  # fmt: skip

    def microbatches(self, job: Job) -> int:
        """Return the number of microbatches that each rank runs in a step."""
        return job.batch // (self.dp * self.microbatch)

    def tokens(self, job: Job) -> int:
        """Return the tokens of one microbatch on one rank."""
        return self.microbatch * job.seq_len // self.cp

    @property
    def name(self) -> str:
        """The layout as text that `parse_layout` reads: dp4-pp2-tp8-zero1-mb1-full."""
        axes = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1] or ["dp1"]
        number = f":{self.chunks}" if SCHEDULES[self.schedule].chunks is None else ""
        order = [] if self.pp == 1 else [self.schedule + number]
        again = [] if self.recompute == "none" else [self.recompute]
        how = [] if self.cp_attention == "ring" else [self.cp_attention]
        return "-".join([*axes, *how, f"zero{self.zero}", f"mb{self.microbatch}", *order, *again])


def parse_layout(text: str) -> Layout:
    """Read a layout, such as `dp4-pp2-tp8-zero1-mb2-interleaved:2-full`. Omitted parts take their defaults.

    Raises ValueError, naming the part that cannot be read.
    """
    values: dict[str, Any] = {}
    rest, not_planned = text, unplanned()
    # Schedules are found first: some of their names have a hyphen, and the rest of the text is split at hyphens.
    for schedule in sorted((*FORMS, *not_planned), key=len, reverse=True):
        found = re.search(rf"(?:^|-){re.escape(schedule)}(?::(\d+))?(?=-|$)", rest)
        if found:
            if schedule in not_planned:
                raise ValueError(f"layout={text!r}: {schedule} {not_planned[schedule]}")
            values["schedule"] = schedule
            values["chunks"] = chunks_per_rank(schedule, int(found[1]) if found[1] else None)
            rest = rest.replace(found[0], "", 1)
            break
    for word in filter(None, rest.split("-")):
        found = re.fullmatch(r"(dp|pp|cp|ep|tp|zero|mb)(\d+)", word)
        if found:
            values["microbatch" if found[1] == "mb" else found[1]] = int(found[2])
        elif word in ("none", "selective", "full", *PARTIAL) or re.fullmatch(r"every:[1-9]\d*", word):
            values["recompute"] = word
        elif word in ATTENTIONS:
            values["cp_attention"] = word
        else:
            raise ValueError(
                f"layout={text!r}: {word!r} cannot be read; write for example dp4-pp2-tp8-zero1-mb1-1f1b-full"
            )
    layout = Layout(**values)
    if not all(f.default != 1 or getattr(layout, f.name) >= 1 for f in fields(Layout)) or layout.zero > 3:
        raise ValueError(f"layout={text!r}: sizes begin at 1, and zero is 0 to 3")
    return layout


# What `minipar train` refuses, of what a layout says. The rules that most layouts of a search break come first.
PLANNED = (
    Rule(
        lambda v: v.dp * v.pp * v.cp * v.tp != v.gpus,
        lambda v: f"dp*pp*cp*tp={v.dp * v.pp * v.cp * v.tp} ranks, and there are gpus={v.gpus}",
        "",
    ),
    divides("dp", "batch_size"),
    divides("mb", SAMPLES, samples_of_rank),
    *STAGES,
    *TENSOR,
    *EXPERTS,
    *TOKENS,
    WHOLE_GROUPS,
)


class Planned(View):
    """A layout as rules see it. What a job fixes is in a subclass, so that a view is made without copying it."""

    pad_vocab, cp_layout = False, "zigzag"
    mb = property(attrgetter("microbatch"))
    ranks_of_heads = property(attrgetter("tp"))
    num_stages = property(lambda v: v.pp * v.chunks)


@cache
def views_of(job: Job) -> type[Planned]:
    """Return the class of a job's views: given a layout's fields, an instance has what rules ask of both."""
    how = job.implementation
    ulysses = property(lambda v: how.cp_ulysses if v.cp_attention == "usp" else 1)
    fixed = dict(hidden_dim=_split_width(job), batch_size=job.batch, cp_ulysses=ulysses)
    return type("PlannedJob", (Planned,), vars(job.shape) | vars(how) | vars(job) | fixed)


def why_illegal(job: Job, layout: Layout) -> str | None:
    """Return in one line why this layout is not legal for the job; None if it is. Memory is not checked."""
    view = views_of(job)(vars(layout))
    if rule := broken(view, PLANNED):
        return say(rule.words, view)
    return why_not_priced(job, layout)


def require_legal(job: Job, layout: Layout) -> None:
    """Raise ValueError if the layout is not legal for the job."""
    if why := why_illegal(job, layout):
        raise ValueError(f"layout {layout.name} is not legal: {why}")


def _split_width(job: Job) -> int:
    """Return a width that tp must divide so that it divides the width of every MLP that it splits."""
    shape = job.shape
    if not shape.num_experts or not job.implementation.fold_experts:
        return gcd(shape.hidden_dim, shape.dense_width)
    return shape.dense_width if shape.dense_layers or shape.moe_every > 1 else shape.shared_dim or shape.dim


def why_not_priced(job: Job, layout: Layout) -> str | None:
    """Return why the formulas do not hold for the layout, or why it only repeats another layout; None if neither."""
    a, shape, choice = layout, job.shape, SCHEDULES[layout.schedule]
    layers = -(-shape.num_layers // (a.pp * a.chunks))
    if a.pp == 1 and a.schedule != "1f1b":
        return f"schedule={a.schedule} needs pp of 2 or more"
    if a.cp == 1 and a.cp_attention != "ring":
        return f"cp_attention={a.cp_attention} needs cp of 2 or more"
    if a.cp_attention == "ulysses":
        kv = max(1, shape.num_kv_heads // a.tp)
        if a.cp % kv and kv % a.cp:
            return f"cp={a.cp} neither divides a rank's {kv} key/value heads nor is a multiple of them"
    if a.unit > layers:
        return f"recompute={a.recompute} is more than the {layers} layers of a stage"
    if a.recompute == "selective" and job.implementation.attention != "dense":
        return "recompute=selective repeats dense attention, and this attention stores no scores"
    if a.recompute in PARTIAL and a.recompute not in job.implementation.partial:
        return f"recompute={a.recompute} is what another program has; use none, full or every:N"
    if choice.chunks is not None and a.chunks != choice.chunks:
        return f"schedule={a.schedule} has {choice.chunks} chunks a rank, not {a.chunks}"
    m = a.microbatches(job)
    if not enough_microbatches(a.schedule, a.pp, m):
        return f"{m} microbatches do not fill schedule={a.schedule} over pp={a.pp}"
    return None
