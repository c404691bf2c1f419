"""The choices "chunks", "once-per-node" and "shadow" of `--dispatch`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minipar.config.choices import Dispatch, NodeOptions
from minipar.support.errors import divisors, one_of
from minipar.support.options import option

CHUNKS = "number of parts in which tokens are sent to experts and back, each while another is computed"


@dataclass(frozen=True)
class ChunkOptions(NodeOptions):
    """The options of the dispatch that sends rows in chunks."""

    chunks: int = option(2, CHUNKS)


@dataclass(frozen=True)
class OncePerNodeOptions(NodeOptions):
    """The options of the dispatch that sends a token to each node once."""

    chunks: int = option(1, CHUNKS)


@dataclass(frozen=True)
class ShadowOptions(NodeOptions):
    """The options of the dispatch that replicates hot experts."""

    rows: float = option(
        0.0,
        "replicate an expert on all ep ranks, for one step of its layer, if that takes more than this many rows off the "
        "busiest rank",
    )


class UnpricedDispatch(Dispatch):
    """A dispatch for which the planner uses the formulas of all-to-all."""

    def not_priced(self, config: Any) -> str:
        return f"dispatch={config.dispatch}"

    def check_options(self, options: Any, ep: int) -> None:
        if getattr(options, "chunks", 1) < 1:
            raise ValueError(f"dispatch.chunks={options.chunks} is out of range; use 1 or more")


class InChunks(UnpricedDispatch):
    """The dispatch that sends rows in chunks."""

    def check(self, config: Any) -> None:
        super().check(config)
        chunks = config.options["dispatch"].chunks
        if chunks > 1 and config.ep == 1:
            raise ValueError(
                f"dispatch.chunks={chunks} cuts what ep ranks send to one another's experts, and ep=1; use ep=2 or more"
            )
        samples = config.batch_size // config.dp // config.microbatches
        most = samples * (config.seq_len // config.cp) * config.model.num_experts
        if chunks > max(1, most):
            raise ValueError(
                f"dispatch.chunks={chunks} are more than the {most} rows that a rank could send, a microbatch's tokens to "
                f"num_experts={config.model.num_experts} each; use {most} or fewer"
            )

    def variants(self, config: Any) -> list[dict[str, Any]]:
        return [{"chunks": 2}] if config.ep > 1 else []


class OncePerNodeChoice(InChunks):
    """The dispatch that sends a token to each node once; inside nodes it may send rows in chunks."""

    def check_options(self, options: Any, ep: int) -> None:
        super().check_options(options, ep)
        if options.node_size is None:
            raise ValueError(
                f"dispatch=once-per-node needs node_size, how many of ep={ep} ranks are a node; use {one_of(divisors(ep))}"
            )

    def variants(self, config: Any) -> list[dict[str, Any]]:
        return [{"node_size": divisors(config.ep)[-2]}] if config.ep > 1 else []


class Shadow(UnpricedDispatch):
    """The dispatch that replicates hot experts."""

    def check_options(self, options: Any, ep: int) -> None:
        if not (options.rows >= 0 and ep > 1):
            raise ValueError(
                f"dispatch.rows={options.rows} with ep={ep}: it is the rows that a replica must save one of several ranks; "
                "use 0 or more with ep=2 or more"
            )

    def variants(self, config: Any) -> list[dict[str, Any]]:
        return [{"rows": 0.0}] if config.ep > 1 else []


CHUNKS_CHOICE = InChunks(
    "minipar.extras.experts.install:in_chunks",
    "tokens are sent in parts, each while another is computed",
    ChunkOptions,
)
ONCE_PER_NODE = OncePerNodeChoice(
    "minipar.extras.experts.install:once_per_node",
    "a token is sent to each node once, and copied there",
    OncePerNodeOptions,
)
SHADOW = Shadow(
    "minipar.extras.experts.install:shadow",
    "hot experts' weights are sent to all ranks, instead of their tokens to them",
    ShadowOptions,
)
