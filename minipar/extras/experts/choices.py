"""The choices that these modules add, of `--dispatch` and of `--tp-layout`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minipar.config.choices import Dispatch, NodeOptions, OneDim
from minipar.config.rules import Rule, broken, check, view_of
from minipar.support.options import option


@dataclass(frozen=True)
class ChunkOptions(NodeOptions):
    """The options of the dispatch that sends rows in chunks."""

    chunks: int = option(
        2, "number of parts in which tokens are sent to experts and back, each while another is computed"
    )


@dataclass(frozen=True)
class ShadowOptions(NodeOptions):
    """The options of the dispatch that replicates hot experts."""

    rows: float = option(
        0.0,
        "replicate an expert on all ep ranks, for one step of its layer, if that takes more than this many rows off the "
        "busiest rank",
    )


@dataclass(frozen=True)
class BalanceOptions(NodeOptions):
    """The options of the dispatch that moves experts."""

    every: int = option(
        10, "steps after which experts are moved, if that lowers the load of the busiest rank"
    )


class InChunks(Dispatch):
    """The dispatch that sends rows in chunks."""

    unpriced = ""

    def check_options(self, options: Any, ep: int) -> None:
        if options.chunks < 1:
            raise ValueError(f"dispatch.chunks={options.chunks} is out of range; use 1 or more")

    def check(self, config: Any) -> None:
        super().check(config)
        chunks = config.options["dispatch"].chunks
        if chunks > 1 and config.ep == 1:
            raise ValueError(
                f"dispatch.chunks={chunks} cuts what ep ranks send to one another's experts, and ep=1; use ep=2 or more"
            )
        samples = min(n // m for n, m in zip(config.dp_samples, config.dp_microbatches))
        most = samples * (config.seq_len // config.cp) * config.model.num_experts
        if chunks > max(1, most):
            raise ValueError(
                f"dispatch.chunks={chunks} are more than the {most} rows that a rank could send, a microbatch's tokens to "
                f"num_experts={config.model.num_experts} each; use {most} or fewer"
            )

    def variants(self, config: Any) -> list[dict[str, Any]]:
        return [{"chunks": 2}] if config.ep > 1 else []


class Shadow(Dispatch):
    """The dispatch that replicates hot experts."""

    unpriced = ""

    def check_options(self, options: Any, ep: int) -> None:
        if not (options.rows >= 0 and ep > 1):
            raise ValueError(
                f"dispatch.rows={options.rows} with ep={ep}: it is the rows that a replica must save one of several ranks; "
                "use 0 or more with ep=2 or more"
            )

    def variants(self, config: Any) -> list[dict[str, Any]]:
        return [{"rows": 0.0}] if config.ep > 1 else []


# What a run must meet to move experts.
MOVED_EXPERTS = (
    Rule(
        lambda v: v.ep == 1,
        "dispatch=balance moves whole experts with their state, and ep={ep} leaves no other rank for an expert",
        "; use ep=2 or more",
    ),
    Rule(
        lambda v: v.zero > 0 and v.dp * v.cp > v.ep,
        lambda v: (
            f"dispatch=balance moves whole experts with their state, and zero={v.zero} divides each expert's state over "
            f"its {v.dp * v.cp // v.ep} replicas"
        ),
        lambda v: f"; use zero=0, or ep={v.dp * v.cp}, which has no replicas",
    ),
    Rule(
        lambda v: v.compress != "none",
        "dispatch=balance moves whole experts with their state, and compress={compress} keeps state of its own for each",
        "; use compress=none",
    ),
    Rule(
        lambda v: v.offload != "none",
        "dispatch=balance moves whole experts with their state, and offload={offload} keeps states elsewhere",
        "; use offload=none",
    ),
)


class Balance(Dispatch):
    """The dispatch that moves experts, with weights and optimizer states, to ranks with less load."""

    unpriced = ""

    def check_options(self, options: Any, ep: int) -> None:
        if options.every < 1:
            raise ValueError(f"dispatch.every={options.every} is out of range; use 1 or more steps")

    def check(self, config: Any) -> None:
        super().check(config)
        check(view_of(config), MOVED_EXPERTS)

    def end_step(self, config: Any, state: Any, step: int) -> None:
        from minipar.extras.experts.moved_experts import balance_experts

        balance_experts(config, state, step)

    def variants(self, config: Any) -> list[dict[str, Any]]:
        return [] if broken(view_of(config), MOVED_EXPERTS) else [{"every": 1}]


# What a run must meet to send slices of the rows for experts.
SLICED_ROWS = (
    Rule(
        lambda v: not v.num_experts,
        "tp_layout={tp_layout} slices rows for experts, and num_experts={num_experts}: the model sends none",
        "; use tp_layout=1d",
    ),
    Rule(
        lambda v: 1 in (v.ep, v.tp),
        "tp_layout={tp_layout} slices rows for experts, and ep={ep}, tp={tp}: they go over ep, sliced over tp",
        "; use 2 or more of both",
    ),
    Rule(
        lambda v: v.shared_dim > 0,
        "tp_layout={tp_layout} slices rows for experts, and shared_dim={shared_dim}: a shared expert needs whole tokens",
        "; use 0",
    ),
    Rule(
        lambda v: v.dispatch not in ("all-to-all", "chunks", "balance"),
        "tp_layout={tp_layout} slices rows for experts, and dispatch={dispatch} sends other things, too",
        "; use all-to-all, chunks or balance",
    ),
)


class SlicedRows(OneDim):
    """The layout of tp 1d whose ranks each send a part of the rows for experts."""

    unpriced = ""

    def check(self, config: Any) -> None:
        super().check(config)
        check(view_of(config), SLICED_ROWS)


CHUNKS_CHOICE = InChunks(
    "minipar.extras.experts.install:in_chunks",
    "tokens are sent in parts, each while another is computed",
    ChunkOptions,
)
SHADOW = Shadow(
    "minipar.extras.experts.install:shadow",
    "hot experts' weights are sent to all ranks, instead of their tokens to them",
    ShadowOptions,
)
BALANCE = Balance(
    "minipar.extras.experts.install:balance",
    "experts are moved, with their optimizer state, to ranks with less load",
    BalanceOptions,
)
SLICED = SlicedRows(
    "minipar.extras.experts.sliced_rows:cut_with_sliced_rows",
    "as 1d, and each rank sends only its slice of the rows for experts",
)
