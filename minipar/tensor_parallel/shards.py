"""This rank's shard of a parameter, as a parameter with a placement."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from minipar.mesh import Placement, cut_in_place, placement_of, set_placement


def shard_parameter(
    parameter: Tensor, dim: int, index: int, count: int, copies: bool = False
) -> nn.Parameter:
    """Return shard `index` of `count` along `dim` as a new parameter; with `copies`, other tp ranks hold it, too.

    The parameter may already be a shard along another dim, like stacked experts, which are sharded over ep.
    """
    before = placement_of(parameter)
    placement = before.shard(dim, index, count)
    start = placement.start[dim] - before.start[dim]
    values = parameter.detach().narrow(dim, start, placement.length[dim]).clone()
    part = nn.Parameter(values, requires_grad=parameter.requires_grad)
    set_placement(part, placement.replicate("tp") if copies else placement)
    return part


def replicate_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Mark the parameter as replicated over tp, and return it."""
    set_placement(parameter, placement_of(parameter).replicate("tp"))
    return parameter


def keep_parameters(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Put the shards into the parameters of before the cut, by name: an optimizer that has those trains the cut model."""
    for name, shard in list(model.named_parameters()):
        parameter = before[name]
        if parameter is not shard:
            vars(parameter).update(vars(shard))
            cut_in_place(parameter, shard.data, placement_of(shard))
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)


def place(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
    """Copy the part of a whole parameter that `placement` describes into a new parameter."""
    part = nn.Parameter(placement.slice_of(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
    set_placement(part, placement)
    return part
