"""Expert parallelism of the whole model: which parameters are sharded, and over which ranks gradients are summed.

    experts.gate, up, down   [E, ...] -> [E/ep, ...]    each rank has its own; gradients are not summed over ep
    router, shared expert    whole on every rank

An expert receives the tokens of all ep ranks, so its gradient already is a sum over them: it is summed only over edp, the
replicas of the expert, and never divided by ep. All other gradients are summed over dp x cp.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from minipar.errors import require_divides
from minipar.expert.dispatch import AllToAll
from minipar.mesh import place_whole, placement_of, set_placement
from minipar.model.moe import MoE, moe_layers


def expert_parallel(
    model: nn.Module,
    comm,
    overlap: bool | None = None,
    node_size: int | None = None,
    algorithm: str = "auto",
) -> nn.Module:
    """Shard the experts of every mixture in the model over `comm`, in place; returns the model.

    comm       the ep ranks, each with its own tokens; each calls this with the same model
    overlap    dispatch rows while the shared expert computes; None: in mixtures that have a shared expert
    node_size  None, or the ranks per node of a two-level all-to-all: see `overlapped_all_to_all.py`
    algorithm  of the all-to-all

    Call it before or after `tensor_parallel`, but before `DDP`, `FSDP` and optimizers. A stage without mixtures is
    unchanged. Sends, per mixture, what `AllToAll` sends. Raises ValueError where ep does not divide num_experts or experts
    are already sharded, or node_size does not divide ep, before anything is changed.
    """
    layers = list(moe_layers(model))
    if node_size is not None:
        require_divides("node_size", node_size, "ep", comm.size)
    for _, moe in layers:
        require_divides("ep", comm.size, "num_experts", moe.options.num_experts)
        if moe.experts.gate.shape[0] != moe.options.num_experts:
            raise ValueError(
                f"{moe.experts.gate.shape[0]} of num_experts={moe.options.num_experts} experts are left here: "
                "they are spread already; call expert_parallel once"
            )
    for name, moe in layers:
        shard_moe(moe, comm, name)
        if comm.size > 1:
            overlaps = bool(moe.shared) if overlap is None else overlap
            moe.overrides.dispatch = AllToAll(comm.using(algorithm), overlaps, node_size)
            moe.overrides.pad_to_capacity = True
    return model


def shard_moe(moe: MoE, comm, name: str) -> None:
    """Keep this rank's experts of one mixture, whose canonical name is `name`; give all its parameters placements."""
    place_whole(moe, f"{name}." if name else "")
    for own_name, parameter in list(moe.experts.named_parameters()):
        setattr(moe.experts, own_name, _local_experts(parameter, comm))


def _local_experts(parameter: nn.Parameter, comm) -> nn.Parameter:
    E = parameter.shape[0]
    start, length = comm.rank * E // comm.size, E // comm.size
    own = nn.Parameter(parameter.detach()[start : start + length].clone(), parameter.requires_grad)
    set_placement(own, placement_of(parameter).split(0, start, length))
    return own


def is_expert(parameter: nn.Parameter) -> bool:
    """Return whether this is a weight of experts, sharded over ep. A buffer, which has no placement, is not."""
    placement = getattr(parameter, "placement", None)
    return placement is not None and placement.expert


def gradient_comm(mesh) -> Callable[[nn.Parameter], object]:
    """Return a function from a parameter to the Comm over which its gradient is summed.

    Pass it as `comm` to DDP, ZeroOptimizer and FSDP, with reduce="sum".
    """
    return lambda parameter: mesh.comm("edp") if is_expert(parameter) else mesh.comm("dp", "cp")
