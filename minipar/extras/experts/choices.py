"""The choices that these modules add, of `--dispatch` and of `--tp-layout`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minipar.config.choices import Dispatch, NodeOptions, OneDim
from minipar.config.rules import first, refuse
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


class Balance(Dispatch):
    """The dispatch that moves experts, with weights and optimizer states, to ranks with less load."""

    unpriced = ""

    def check_options(self, options: Any, ep: int) -> None:
        if options.every < 1:
            raise ValueError(f"dispatch.every={options.every} is out of range; use 1 or more steps")

    def check(self, config: Any) -> None:
        super().check(config)
        if reason := self._why_not(config):
            raise ValueError(f"dispatch=balance moves whole experts with their state, and {reason}")

    def _why_not(self, config: Any) -> str | None:
        sharers = config.dp * config.cp
        replicas = sharers // config.ep
        return first({
            f"ep={config.ep} leaves no other rank for an expert; use ep=2 or more": config.ep == 1,
            f"zero={config.zero} divides each expert's state over its {replicas} replicas; use zero=0, or ep={sharers}, "
            "which has no replicas": config.zero > 0 and replicas > 1,
            f"compress={config.compress} keeps state of its own for each expert; use compress=none": (
                config.compress != "none"
            ),
            f"offload={config.offload} keeps states elsewhere; use offload=none": config.offload != "none",
        })  # fmt: skip

    def end_step(self, config: Any, state: Any, step: int) -> None:
        from minipar.extras.experts.moved_experts import balance_experts

        balance_experts(config, state, step)

    def variants(self, config: Any) -> list[dict[str, Any]]:
        return [] if self._why_not(config) else [{"every": 1}]


class SlicedRows(OneDim):
    """The layout of tp 1d whose ranks each send a part of the rows for experts."""

    unpriced = ""

    def check(self, config: Any) -> None:
        super().check(config)
        model = config.model
        refuse(f"tp_layout={config.tp_layout} slices rows for experts, and ", {
            f"num_experts={model.num_experts}: the model sends none; use tp_layout=1d": not model.num_experts,
            f"ep={config.ep}, tp={config.tp}: they go over ep, sliced over tp; use 2 or more of both": (
                1 in (config.ep, config.tp)
            ),
            f"shared_dim={model.shared_dim}: a shared expert needs whole tokens; use 0": model.shared_dim > 0,
            f"dispatch={config.dispatch} sends other things, too; use all-to-all, chunks or balance": (
                config.dispatch not in ("all-to-all", "chunks", "balance")
            ),
        })  # fmt: skip


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
