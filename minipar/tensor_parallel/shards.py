"""A rank's part of a parameter, as a parameter that knows what it is a part of."""

from __future__ import annotations

from torch import nn

from minipar.mesh import Placement, placement_of, set_placement


def cut_parameter(parameter, dim: int, index: int, count: int, copies: bool = False) -> nn.Parameter:
    """Chunk `index` of `count` as a parameter of its own; `copies`: other ranks of tp hold it too.

    The parameter may itself be a part, cut along another dim: experts are, over ep.
    """
    before = placement_of(parameter)
    placement = before.shard(dim, index, count)
    start = placement.start[dim] - before.start[dim]
    part = parameter.detach().narrow(dim, start, placement.length[dim]).clone()
    part = nn.Parameter(part, requires_grad=parameter.requires_grad)
    set_placement(part, placement.replicate("tp") if copies else placement)
    return part


def replicate_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, marked as held whole by every rank of tp."""
    set_placement(parameter, placement_of(parameter).replicate("tp"))
    return parameter


def place(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
    """The part of a whole parameter that `placement` names, in memory of its own."""
    part = nn.Parameter(placement.slice_of(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
    set_placement(part, placement)
    return part
