"""Full state dict, assembled from the ranks' shards by their placements."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.comm.agreement import require_equal
from minipar.comm.objects import all_gather_objects
from minipar.mesh import gather, placement_of


@torch.no_grad()
def full_state_dict(model: nn.Module, comm: Comm) -> dict[str, Tensor]:
    """Return the one-process model's state_dict, keys and values, on every rank.

    All-gathers every parameter's shards over `comm` and assembles them by their placements. Copies of a shard must be
    bitwise equal.

    Sends (tp-1) times this rank's parameters, and their placements once. Allocates the whole model.
    Raises ValueError, naming the parameter, where copies differ or the ranks of `comm` hold different parameters.
    """
    named = dict(model.named_parameters())
    shapes = {name: list(placement_of(p).global_shape) for name, p in named.items()}
    require_equal(
        comm, "parameters", shapes, "pass the ranks over which the model was split, such as mesh.comm('tp')"
    )
    placements = all_gather_objects(comm, {name: placement_of(p) for name, p in named.items()})
    wholes = {}
    for name, parameter in named.items():
        of_ranks = [by_name[name] for by_name in placements]
        sizes = [placement.numel for placement in of_ranks]
        shards = comm.all_gather(parameter.detach().reshape(-1), sizes).split(sizes)
        parts = [(p, shard.view(p.local_shape)) for p, shard in zip(of_ranks, shards)]
        whole = gather(parts)
        wholes[parameter] = whole.reshape(getattr(parameter, "stored_shape", whole.shape))
    every = {name: wholes[p] for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: every.get(name, value) for name, value in model.state_dict(keep_vars=True).items()}
