"""Cut a model into stages of consecutive layers, so that the slowest stage is as fast as possible."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import overload

from torch import nn

from minipar.mesh import place_whole
from minipar.model import MoE, Transformer
from minipar.support.errors import require_positive


@overload
def partition(
    model: Transformer,
    num_stages: int,
    costs: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> list[Transformer]: ...


@overload
def partition(
    model: nn.Sequential,
    num_stages: int,
    costs: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> list[nn.Sequential]: ...


def partition(
    model: Transformer | nn.Sequential,
    num_stages: int,
    costs: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> Sequence[nn.Module]:
    """Return the stages of `model` in order, each a copy of its layers; the first has the embedding, the last the head.

    Each parameter has the placement of a whole tensor, named as in the model, so gradient norms and checkpoints know it.

    model   a Transformer, or any layers in a Sequential, each from one tensor to one tensor
    costs   one per layer; a Transformer's first includes the embedding, its last the head. None: `layer_costs(model)`
    speeds  one per stage, as in `balance`

    Raises ValueError for a model of another class, if there are fewer layers than stages, if costs and layers differ in
    number, or if a trained parameter of a Sequential would be in two stages.
    """
    if not isinstance(model, Transformer | nn.Sequential):
        raise ValueError(
            f"a {type(model).__name__} cannot be cut into stages; put its layers, each from one tensor to one tensor, into "
            "an nn.Sequential"
        )
    num_layers = len(model if isinstance(model, nn.Sequential) else model.layers)
    costs = layer_costs(model) if costs is None else costs
    if len(costs) != num_layers:
        raise ValueError(f"costs has {len(costs)} entries for {num_layers} layers; give one per layer")
    cuts = balance(costs, num_stages, speeds)
    stages: list[nn.Module] = []
    if isinstance(model, nn.Sequential):
        slices = [model[layers.start : layers.stop] for layers in cuts]
        _require_unshared(slices)
        stages += [copy.deepcopy(layers) for layers in slices]
    else:
        stages += [
            model.stage(layers, first=stage == 0, last=stage == num_stages - 1)
            for stage, layers in enumerate(cuts)
        ]
    for stage in stages:
        place_whole(stage)  # a stage's layers keep their names in the model
    return stages


def _require_unshared(slices: Sequence[nn.Module]) -> None:
    """Raise ValueError if two slices share a trained parameter: each copy would get only a part of its gradient."""
    owners: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, layers in enumerate(slices):
        for name, parameter in layers.named_parameters():
            first, first_name = owners.setdefault(parameter, (stage, name))
            if first != stage and parameter.requires_grad:
                raise ValueError(
                    f"{name} of stage {stage} is {first_name} of stage {first}, and each would train a copy; untie them, "
                    "or cut elsewhere"
                )


def layer_costs(model: Transformer | nn.Sequential) -> list[float]:
    """Return the multiply-adds per token of each layer's forward: one per element of each weight matrix that it uses.

    A token uses top_k of E experts; under expert choice, E * capacity / group on average. Attention adds, per layer,
    num_heads * head_dim * max_seq_len for two products, each over max_seq_len / 2 keys on average; latent attention also
    multiplies rotary features. The embedding, which copies a row, adds dim to the first layer; the head adds its matrix to
    the last.
    For a Sequential, only the matrices are counted.
    """
    if isinstance(model, nn.Sequential):
        return [float(sum(_matrix_elems(module) for module in layer.modules())) for layer in model]
    config = model.config
    attention = config.core_width * config.max_seq_len / 2
    costs = [attention + _active_elems(layer, config.max_seq_len) for layer in model.layers.values()]
    costs[0] += config.dim
    costs[-1] += config.dim * config.vocab_size
    return costs


def _active_elems(layer: nn.Module, seq_len: int) -> float:
    """Return the number of elements of the layer's weight matrices that multiply a token."""
    elems = float(sum(_matrix_elems(module) for module in layer.modules()))
    mlp = layer.mlp
    if not isinstance(mlp, MoE):
        return elems
    options, experts = mlp.options, sum(w.numel() for w in mlp.experts.parameters())
    share = options.top_k / options.num_experts
    if options.router == "expert_choice":
        group = options.group_tokens or seq_len
        share = options.capacity(group) / group
    return elems - experts * (1 - share)


def _matrix_elems(module: nn.Module) -> int:
    """Return the elements of the module's own matrices, none for an embedding, which copies rows."""
    if isinstance(module, nn.Embedding):
        return 0
    return sum(w.numel() for w in module.parameters(recurse=False) if w.dim() > 1)


def balance(costs: Sequence[float], num_stages: int, speeds: Sequence[float] | None = None) -> list[range]:
    """Cut layers 0 ... n-1 into `num_stages` ranges, none empty, so that the slowest stage takes the least time.

    best(s, n) = min over k of max(best(s-1, k), sum of costs[k:n] / speeds[s])        by dynamic programming: exact

    costs   work per layer, such as measured seconds
    speeds  work per unit of time of each stage's rank, for unequal machines; None: all equal. A rank at half the speed of
            the other ranks gets about half as many layers

    Takes O(num_stages n^2) time. Of several optimal cuts, returns the one with the longest last stages.
    Raises ValueError if there are fewer layers than stages, a cost is negative, or a speed is not above 0.
    Source: PipeDream, SOSP 2019, section 3.1, for one kind of link.
    """
    require_positive(num_stages=num_stages)
    num_layers = len(costs)
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers for num_stages={num_stages}: a stage needs a layer; use at most {num_layers} stages"
        )
    if min(costs) < 0:
        raise ValueError(f"costs={list(costs)} has a negative entry; use costs of at least 0")
    speeds = [1.0] * num_stages if speeds is None else speeds
    if len(speeds) != num_stages or min(speeds) <= 0:
        raise ValueError(
            f"speeds={list(speeds)} for num_stages={num_stages}; give a number above 0 per stage"
        )
    before = [0.0, *accumulate(costs)]
    # best[n] is (time of the slowest stage, first layer of the last stage) for the first n layers; at first with one stage.
    best = [(before[n] / speeds[0], 0) for n in range(num_layers + 1)]
    table = [best]
    for stages in range(2, num_stages + 1):
        best = [
            min(
                (max(best[k][0], (before[n] - before[k]) / speeds[stages - 1]), k)
                for k in range(stages - 1, n)
            )
            if n >= stages
            else (float("inf"), 0)
            for n in range(num_layers + 1)
        ]
        table.append(best)
    cuts = [num_layers]
    for best in reversed(table):
        cuts.append(best[cuts[-1]][1])
    return [range(first, last) for last, first in zip(cuts, cuts[1:])][::-1]
