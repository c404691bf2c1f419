"""Expert parallelism of the whole model: which parameters are sharded, and over which ranks gradients are summed.

    experts.gate, up, down   [E, ...] -> [E/ep, ...]    each rank has its own; gradients are not summed over ep
    router, shared expert    whole on every rank

An expert receives the tokens of all ep ranks, so its gradient already is a sum over them. It is summed only over edp, the
replicas of the expert, and never divided by ep. All other gradients are summed over dp x cp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from minipar.comm import Comm
from minipar.config.choices import DISPATCHES, NodeOptions
from minipar.mesh import Mesh, cut_in_place, place_whole, placement_of
from minipar.model.moe import MoE, moe_layers
from minipar.support.errors import require_divides
from minipar.support.options import make_options


def expert_parallel(
    model: nn.Module,
    comm: Comm,
    overlap: bool | None = None,
    algorithm: str = "auto",
    dispatch: str = "all-to-all",
    **options: Any,
) -> nn.Module:
    """Shard the experts of every MoE layer of the model over `comm`, in place; returns the model.

    comm       the ep ranks, each with its own tokens; each calls this with the same model
    overlap    dispatch rows while the shared expert computes; None: do so in layers that have a shared expert
    algorithm  the algorithm of the all-to-all
    dispatch   how tokens reach their experts: a name in `minipar.config.choices.DISPATCHES`
    options    options of that dispatch; all-to-all has node_size: None, or the ranks per node of a two-level all-to-all

    Call it before or after `tensor_parallel`, but before `DDP`, `FSDP` and optimizers. A stage without MoE layers is
    unchanged. Each layer sends what its dispatch sends: see `AllToAll`. Raises ValueError, before anything is changed, if
    ep does not divide num_experts, experts are already sharded, or the dispatch is unknown or lacks these options.
    """
    layers, way = list(moe_layers(model)), DISPATCHES[dispatch]
    chosen = make_options(way.options or NodeOptions, "dispatch", options)
    if (node_size := getattr(chosen, "node_size", None)) is not None:
        require_divides("node_size", node_size, "ep", comm.size)
    for _, moe in layers:
        require_divides("ep", comm.size, "num_experts", moe.options.num_experts)
        if moe.experts.gate.shape[0] != moe.options.num_experts:
            raise ValueError(
                f"{moe.experts.gate.shape[0]} of num_experts={moe.options.num_experts} experts are left here: "
                "they are spread already; call expert_parallel once"
            )
    way.check_options(chosen, comm.size)
    install = way.load()
    for name, moe in layers:
        shard_moe(moe, comm, name)
        if comm.size > 1:
            install(moe, comm.using(algorithm), bool(moe.shared) if overlap is None else overlap, chosen)
    return model


def shard_moe(moe: MoE, comm: Comm, name: str) -> None:
    """Keep this rank's experts of one MoE layer, whose canonical name is `name`; give all its parameters placements."""
    place_whole(moe, f"{name}." if name else "")
    for parameter in moe.experts.parameters():
        _keep_local_experts(parameter, comm)


def _keep_local_experts(parameter: nn.Parameter, comm: Comm) -> None:
    E = parameter.shape[0]
    start, length = comm.rank * E // comm.size, E // comm.size
    placement = placement_of(parameter).split(0, start, length)
    cut_in_place(parameter, parameter.data[start : start + length].clone(), placement)


def is_expert(parameter: Tensor) -> bool:
    """Return whether this is a weight of experts, which is sharded over ep; False for a buffer, which has no placement."""
    placement = getattr(parameter, "placement", None)
    return placement is not None and placement.expert


def gradient_comm(mesh: Mesh) -> Callable[[Tensor], Comm]:
    """Return a function from a parameter to the Comm over which its gradient is summed.

    Pass it as `comm` to DDP, ZeroOptimizer and FSDP, with reduce="sum".
    """
    return lambda parameter: mesh.comm("edp") if is_expert(parameter) else mesh.comm("dp", "cp")
