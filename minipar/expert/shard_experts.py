"""Expert parallelism of the whole model: which parameters are sharded, and over which ranks gradients are summed.

    experts.gate, up, down   [E, ...] -> [E/ep, ...]    each rank has its own; gradients are not summed over ep
    router, shared expert    whole on every rank

An expert receives the tokens of all ep ranks, so its gradient already is a sum over them: it is summed only over edp, the
replicas of the expert, and never divided by ep. All other gradients are summed over dp x cp.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from minipar.errors import divisors, one_of, require_divides, require_positive
from minipar.expert.dispatch import AllToAll
from minipar.expert.once_per_node import OncePerNode
from minipar.expert.shadowed_experts import ShadowedAllToAll
from minipar.mesh import place_whole, placement_of, set_placement
from minipar.model.moe import MoE, moe_layers


def expert_parallel(
    model: nn.Module,
    comm,
    overlap: bool | None = None,
    node_size: int | None = None,
    algorithm: str = "auto",
    chunks: int = 1,
    once_per_node: bool = False,
    shadow: float | None = None,
) -> nn.Module:
    """Shard the experts of every mixture in the model over `comm`, in place; returns the model.

    comm           the ep ranks, each with its own tokens; each calls this with the same model
    overlap        dispatch rows while the shared expert computes; None: in mixtures that have a shared expert
    node_size      None, or the ranks per node of a two-level all-to-all: see `overlapped_all_to_all.py`
    algorithm      of the all-to-all
    chunks         parts in which rows travel, each while another is computed: see `dispatched_rows.py`
    once_per_node  with node_size: a token goes to each node once, not once for each choice: see `once_per_node.py`
    shadow         None, or the rows that a replica of a hot expert must save the busiest rank: see `shadowed_experts.py`

    Call it before or after `tensor_parallel`, but before `DDP`, `FSDP` and optimizers. A stage without mixtures is
    unchanged. Sends, per mixture, what `AllToAll`, `OncePerNode` or `ShadowedAllToAll` sends. Raises ValueError where ep
    does not divide num_experts or experts are already sharded, and where the ways to send rows do not fit one another,
    before anything is changed.
    """
    layers = list(moe_layers(model))
    _check_ways(comm.size, node_size, chunks, once_per_node, shadow)
    for _, moe in layers:
        require_divides("ep", comm.size, "num_experts", moe.options.num_experts)
        if moe.experts.gate.shape[0] != moe.options.num_experts:
            raise ValueError(
                f"{moe.experts.gate.shape[0]} of num_experts={moe.options.num_experts} experts are left here: "
                "they are spread already; call expert_parallel once"
            )
    for name, moe in layers:
        shard_moe(moe, comm, name)
        if comm.size == 1:
            continue
        overlaps, fast = bool(moe.shared) if overlap is None else overlap, comm.using(algorithm)
        if once_per_node:
            moe.overrides.dispatch_tokens = OncePerNode(fast, node_size, overlaps, chunks)
        elif shadow is not None:
            moe.overrides.dispatch = ShadowedAllToAll(fast, shadow, overlaps, node_size)
        else:
            moe.overrides.dispatch = AllToAll(fast, overlaps, node_size, chunks)
            moe.overrides.pad_to_capacity = True
    return model


def _check_ways(
    ep: int, node_size: int | None, chunks: int, once_per_node: bool, shadow: float | None
) -> None:
    require_positive(chunks=chunks)
    if node_size is not None:
        require_divides("node_size", node_size, "ep", ep)
    elif once_per_node:
        raise ValueError(
            f"once_per_node=True with node_size=None: say how many of ep={ep} ranks are a node, {one_of(divisors(ep))}"
        )
    if shadow is not None and not shadow >= 0:
        raise ValueError(f"shadow={shadow} is no number of rows; use 0 or more, or None for no replicas")
    if shadow is not None and (once_per_node or chunks > 1):
        raise ValueError(
            f"shadow={shadow} keeps rows where they are, by choice and all at once; use chunks=1, not {chunks}, and "
            f"once_per_node=False, not {once_per_node}"
        )


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
    return lambda parameter: mesh.sharing("edp") if is_expert(parameter) else mesh.sharing("dp", "cp")
