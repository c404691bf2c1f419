"""A job (model, machine, batch) and a layout of it over ranks: what the other modules compute the costs of."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal

from minipar.cost.machines import Machine
from minipar.cost.models import ModelShape
from minipar.cost.slices import slices_obstacle
from minipar.cost.stages import PLANNED, UNPLANNED, enough_microbatches
from minipar.errors import one_of, require_positive
from minipar.schedules.registry import LOOPED, SLICED, chunks_per_rank

AXES = ("dp", "pp", "cp", "ep", "tp")
CP_ATTENTIONS = ("ring", "ulysses", "all_gather", "usp")


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of weights, gradients and optimizer state (with master weights); bytes of an activation."""

    weight: int
    gradient: int
    state: int
    activation: int


# mixed: ZeRO's 2 + 2 + 12, fp16 or bf16 with fp32 master weights and Adam; mixed-fp32-grads: Megatron-LM's 2 + 4 + 12.
PRECISIONS = {
    "mixed": Precision(2, 2, 12, 2),
    "mixed-fp32-grads": Precision(2, 4, 12, 2),
    "float32": Precision(4, 4, 8, 4),
    "float64": Precision(8, 8, 16, 8),
}


@dataclass(frozen=True)
class Implementation:
    """Habits of a training program that no layout states. The defaults are minipar's.

    attention          "flash": scores are not stored, and the causal mask halves their work; "dense": stored, all computed;
                       "fused": as flash, but torch's kernels, which store a mask where samples are cut into slices
    overlap_gradients  gradients are reduced during the last microbatch's backward; otherwise after it
    sequence_parallel  wherever tp > 1: tokens are split over tp between the split matrices
    scatter_pipeline   without it: tp ranks send a part each of a stage's output, and all-gather it inside the node
    reduce_every       "microbatch": ZeRO-2 reduces gradients after each, and holds its part of them alone
    replicate          groups of the dp x cp ranks that each have all of ZeRO-3's shards: hybrid sharding
    cp_ulysses         ranks of a group of cp_attention="usp"
    group_tokens       tokens that experts are given together, which no slice cuts; None: a slice's

    The three before the last change bytes and memory; no time is predicted for them.
    """

    attention: Literal["flash", "fused", "dense"] = "flash"
    overlap_gradients: bool = True
    sequence_parallel: bool = True
    scatter_pipeline: bool = False
    reduce_every: Literal["step", "microbatch"] = "step"
    replicate: int = 1
    cp_ulysses: int = 1
    group_tokens: int | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """A training to plan: the model, the machine, the batch. Compared by identity, so that caches find it fast.

    seq_len  tokens a sample    batch  samples a step, over all ranks

    Raises ValueError for a size below 1, or a precision that is unknown.
    """

    shape: ModelShape
    machine: Machine
    gpus: int
    seq_len: int
    batch: int
    precision: str = "mixed"
    implementation: Implementation = Implementation()

    def __post_init__(self):
        require_positive(gpus=self.gpus, seq=self.seq_len, batch=self.batch)
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision={self.precision!r} is unknown; use {one_of(PRECISIONS, near=self.precision)}"
            )

    @property
    def bytes_of(self) -> Precision:
        return PRECISIONS[self.precision]


@dataclass(frozen=True, order=True)
class Layout:
    """The split of a job over ranks: `minipar train`'s flags, but `microbatch` is the samples of one.

    slices  in which a sample's tokens pass through the stages, with seq1f1b and terapipe
    """

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
    slices: int = 1

    @property
    def unit(self) -> int:
        """Layers that are computed again at once: 1 with "full", N with "every:N", 0 where whole layers never are."""
        return 1 if self.recompute == "full" else int(self.recompute.partition(":")[2] or 0)

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def with_order(self, zero: int, schedule: str, chunks: int, slices: int = 1) -> Layout:
        """Return this layout with another ZeRO stage and schedule."""
        return Layout(
            self.dp, self.pp, self.cp, self.ep, self.tp, zero, schedule, chunks, self.microbatch, self.recompute,
            self.cp_attention, slices,
        )  # fmt: skip

    def microbatches(self, job: Job) -> int:
        """Return the number of microbatches in which a rank works through its samples."""
        return job.batch // (self.dp * self.microbatch)

    def tokens(self, job: Job) -> int:
        """Return the tokens of one microbatch on one rank."""
        return self.microbatch * job.seq_len // self.cp

    @property
    def name(self) -> str:
        """As `parse_layout` reads it: dp4-pp2-tp8-zero1-mb1-full."""
        axes = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1] or ["dp1"]
        parts = {**dict.fromkeys(LOOPED, self.chunks), **dict.fromkeys(SLICED, self.slices)}
        number = f":{parts[self.schedule]}" if self.schedule in parts else ""
        order = [] if self.pp == 1 else [self.schedule + number]
        again = [] if self.recompute == "none" else [self.recompute]
        how = [] if self.cp_attention == "ring" else [self.cp_attention]
        return "-".join([*axes, *how, f"zero{self.zero}", f"mb{self.microbatch}", *order, *again])


def parse_layout(text: str) -> Layout:
    """Read a layout: `dp4-pp2-tp8-zero1-mb2-interleaved:2-full`. What is not named has its default.

    Raises ValueError, naming the part that cannot be read.
    """
    values: dict = {}
    rest = text
    # Names with a hyphen, before the text is split at hyphens.
    for schedule in sorted((*PLANNED, *UNPLANNED), key=len, reverse=True):
        found = re.search(rf"(?:^|-){re.escape(schedule)}(?::(\d+))?(?=-|$)", rest)
        if found:
            if schedule in UNPLANNED:
                raise ValueError(f"layout={text!r}: {schedule} {UNPLANNED[schedule]}")
            number = int(found[1]) if found[1] else None
            values |= (
                dict(schedule=schedule, slices=2 if number is None else number)
                if schedule in SLICED
                else dict(schedule=schedule, chunks=chunks_per_rank(schedule, number))
            )
            rest = rest.replace(found[0], "", 1)
            break
    for word in filter(None, rest.split("-")):
        found = re.fullmatch(r"(dp|pp|cp|ep|tp|zero|mb)(\d+)", word)
        if found:
            values["microbatch" if found[1] == "mb" else found[1]] = int(found[2])
        elif word in ("none", "selective", "full") or re.fullmatch(r"every:[1-9]\d*", word):
            values["recompute"] = word
        elif word in CP_ATTENTIONS:
            values["cp_attention"] = word
        else:
            raise ValueError(
                f"layout={text!r}: {word!r} cannot be read; write for example dp4-pp2-tp8-zero1-mb1-1f1b-full"
            )
    layout = Layout(**values)
    if not all(f.default != 1 or getattr(layout, f.name) >= 1 for f in fields(Layout)) or layout.zero > 3:
        raise ValueError(f"layout={text!r}: sizes begin at 1, and zero is 0 to 3")
    return layout


def obstacle(job: Job, layout: Layout) -> str | None:
    """Return why this layout is not legal for the job, in a line; None if it is. Memory is another question."""
    shape, a = job.shape, layout
    kv, world = shape.num_kv_heads, a.world_size
    checks = (
        (world != job.gpus, f"dp*pp*cp*tp={world} ranks, and there are gpus={job.gpus}"),
        (shape.num_heads % a.tp, f"tp={a.tp} does not divide num_heads={shape.num_heads}"),
        (a.tp % kv and kv % a.tp, f"tp={a.tp} neither divides num_kv_heads={kv} nor is a multiple of it"),
        (shape.hidden_dim % a.tp, f"tp={a.tp} does not divide hidden_dim={shape.hidden_dim}"),
        (shape.shared_dim % a.tp, f"tp={a.tp} does not divide shared_dim={shape.shared_dim}"),
        (shape.vocab_size % a.tp, f"tp={a.tp} does not divide vocab_size={shape.vocab_size}"),
        (
            a.cp > 1 and job.seq_len % (2 * a.cp),
            f"2*cp={2 * a.cp} (zigzag) does not divide seq={job.seq_len}",
        ),
        (a.cp == 1 and a.cp_attention != "ring", f"cp_attention={a.cp_attention} needs cp of 2 or more"),
        (
            a.cp_attention == "usp"
            and (job.implementation.cp_ulysses < 2 or a.cp % job.implementation.cp_ulysses),
            f"cp_attention=usp needs cp_ulysses of 2 or more that divides cp={a.cp}",
        ),
        (
            a.cp_attention == "ulysses" and shape.num_heads // a.tp % a.cp,
            f"cp={a.cp} does not divide a rank's {shape.num_heads // a.tp} heads, as cp_attention=ulysses needs",
        ),
        (
            a.cp_attention == "ulysses" and a.cp % max(1, kv // a.tp) and max(1, kv // a.tp) % a.cp,
            f"cp={a.cp} neither divides a rank's {max(1, kv // a.tp)} key/value heads nor is a multiple of them",
        ),
        (
            job.seq_len // a.cp % a.tp,
            f"tp={a.tp} does not divide a rank's tokens, seq/cp={job.seq_len // a.cp}",
        ),
        (a.ep > 1 and not shape.num_experts, f"ep={a.ep}, and the model has no experts"),
        (shape.num_experts % a.ep, f"ep={a.ep} does not divide num_experts={shape.num_experts}"),
        (a.dp * a.cp % a.ep, f"ep={a.ep} does not divide dp*cp={a.dp * a.cp}"),
        (job.batch % a.dp, f"dp={a.dp} does not divide batch={job.batch}"),
        (job.batch // a.dp % a.microbatch, f"mb={a.microbatch} does not divide batch/dp={job.batch // a.dp}"),
        (
            a.unit > 1 and a.unit > -(-shape.num_layers // (a.pp * a.chunks)),
            f"recompute={a.recompute} is more than the {-(-shape.num_layers // (a.pp * a.chunks))} layers of a stage",
        ),
        (a.pp * a.chunks > shape.num_layers, f"{a.pp * a.chunks} stages, and {shape.num_layers} layers"),
        (a.pp == 1 and a.schedule != "1f1b", f"schedule={a.schedule} needs pp of 2 or more"),
        (
            a.recompute == "selective" and job.implementation.attention != "dense",
            "recompute=selective repeats dense attention, and this attention stores no scores",
        ),
    )
    for wrong, why in checks:
        if wrong:
            return why
    m = a.microbatches(job)
    if not enough_microbatches(a.schedule, a.pp, m):
        return f"{m} microbatches do not fill schedule={a.schedule} over pp={a.pp}"
    if a.schedule not in LOOPED and a.chunks != chunks_per_rank(a.schedule):
        return f"schedule={a.schedule} has {chunks_per_rank(a.schedule)} chunks a rank, not {a.chunks}"
    return slices_obstacle(job, a)
