"""Saving and loading a sharded optimizer's state: {"state": {number: {key: value}}, "param_groups": [...]}, as in torch.

    full    gathered: the state that torch's own optimizer would have, which any number of ranks can load
    own     this rank's part of each value, and under "parts" its range; only a rank with the same part can load it

Where the optimizer keeps master weights, the state also has them, under "master".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minipar.data_parallel.arguments import ParamGroup
from minipar.data_parallel.chunk_optimizer import MASTER, ChunkOptimizer, is_per_element, options_of
from minipar.data_parallel.sharded_bucket import ShardedBucket
from minipar.mesh import placement_of

Chunks = list[ChunkOptimizer[ShardedBucket]]
StateDict = dict[str, Any]


def full_state_dict(chunks: Chunks, groups: list[ParamGroup]) -> StateDict:
    """Return the full state, on every rank, on the CPU.

    Sends one all-gather per bucket and key: K (p-1)/p P elements for K keys.
    """
    numbers = _numbers(groups)
    state: dict[int, dict[str, Any]] = {number: {} for number in numbers.values()}
    for chunk in chunks:
        own = _own_states(chunk)
        for key in dict.fromkeys(key for values in own.values() for key in values):
            values = {param: states[key] for param, states in own.items() if key in states}
            gathered = [p for p, value in values.items() if is_per_element(key, value, chunk.masters[p])]
            for param in values.keys() - set(gathered):
                state[numbers[param]][key] = _copy(values[param])
            if not gathered:
                continue
            # All ranks have the same keys, as empty shards are updated.
            whole = torch.zeros_like(chunk.bucket.own, dtype=values[gathered[0]].dtype)
            for param in gathered:
                chunk.bucket.slice_of_chunk(param, whole).copy_(values[param])
            flat = chunk.bucket.comm.all_gather(whole, chunk.bucket.sizes).cpu()
            for param in gathered:
                state[numbers[param]][key] = chunk.bucket.slice_of_full(param, flat).clone()
    return _packed(state, groups)


def own_state_dict(chunks: Chunks, groups: list[ParamGroup]) -> StateDict:
    """Return this rank's part of the state. As in torch, its tensors are the optimizer's own, and change with it."""
    numbers = _numbers(groups)
    state = {numbers[p]: own for chunk in chunks for p, own in _own_states(chunk).items()}
    return {**_packed(state, groups), "parts": {numbers[p]: part for p, part in _parts(chunks).items()}}


def _own_states(chunk: ChunkOptimizer[ShardedBucket]) -> dict[nn.Parameter, dict[str, Any]]:
    chunk.refresh_masters()
    return {
        param: {
            **({MASTER: master.detach()} if chunk.has_master else {}),
            **chunk.optimizer.state.get(master, {}),
        }
        for param, master in chunk.masters.items()
    }


def _parts(chunks: Chunks) -> dict[nn.Parameter, dict[str, int]]:
    """Return, for each parameter, which part of it this rank has, and which rank of how many this is."""
    parts = {}
    for chunk in chunks:
        comm = chunk.bucket.comm
        for param in chunk.masters:
            start, end = chunk.bucket.part(param)
            parts[param] = {"rank": comm.rank, "size": comm.size, "start": start, "end": end}
    return parts


def _numbers(groups: list[ParamGroup]) -> dict[nn.Parameter, int]:
    return {param: i for i, param in enumerate(p for group in groups for p in group["params"])}


def _packed(state: dict[int, dict[str, Any]], groups: list[ParamGroup]) -> StateDict:
    """Return the state dict, with the parameters' numbers in place of the parameters."""
    numbers = _numbers(groups)
    packed = [
        {key: [numbers[p] for p in x] if key == "params" else _copy(x) for key, x in group.items()}
        for group in groups
    ]
    return {"state": {i: own for i, own in sorted(state.items()) if own}, "param_groups": packed}


def load_full_state_dict(chunks: Chunks, groups: list[ParamGroup], full: StateDict) -> None:
    """Load this rank's part of a full state, made on any number of ranks, or by torch's own optimizer. Sends nothing.

    Raises ValueError if groups, parameters or shapes differ; for a shape, the error names the parameter.
    """
    if "parts" in full:
        raise ValueError("this is one rank's state, from state_dict(); load it with load_state_dict")
    _load(chunks, groups, full, whole=True)


def load_own_state_dict(chunks: Chunks, groups: list[ParamGroup], own: StateDict) -> None:
    """Load a state that the same rank of the same number of ranks made, with the same buckets. Sends nothing.

    Raises ValueError if rank, buckets, groups or shapes differ.
    """
    if "parts" not in own:
        raise ValueError(
            f"the state has keys {sorted(own)} and no 'parts': it is not from ZeroOptimizer.state_dict(); "
            "load the state of one process, or full_state_dict()'s, with load_full_state_dict"
        )
    _require_same_groups(groups, own)
    numbers = _numbers(groups)
    names = {number: placement_of(p).name for p, number in numbers.items()}
    here = {numbers[p]: part for p, part in _parts(chunks).items()}
    for number in sorted(here.keys() | own["parts"].keys()):
        part, given = here.get(number), own["parts"].get(number)
        if given != part:
            raise ValueError(
                f"the state's part of {names[number]} is {_in_words(given)}, this rank's is {_in_words(part)}; "
                "to change ranks or buckets use full_state_dict and load_full_state_dict"
            )
    _load(chunks, groups, own, whole=False)


def _in_words(part: dict[str, int] | None) -> str:
    if part is None:
        return "none (it is not trained)"
    return "elements {start} to {end}, of rank {rank} of {size}".format(**part)


@torch.no_grad()
def _load(chunks: Chunks, groups: list[ParamGroup], given: StateDict, whole: bool) -> None:
    """Load a state of which each per-element value is `whole`, or this rank's part. If it does not fit, change nothing."""
    _require_same_groups(groups, given)
    numbers = _numbers(groups)
    found = [(chunk, p, given["state"].get(numbers[p], {})) for chunk in chunks for p in chunk.masters]
    for chunk, param, values in found:
        like = param if whole else chunk.masters[param]
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != like.shape:
                raise ValueError(
                    f"{key} of {placement_of(param).name} has shape {tuple(value.shape)}, "
                    f"this optimizer's {tuple(like.shape)}"
                )
    for group, options in zip(groups, given["param_groups"]):
        group.update({key: _copy(value) for key, value in options_of(options).items()})
    for chunk in chunks:
        chunk.optimizer.state.clear()
    for chunk, param, values in found:
        master = chunk.masters[param]
        own: dict[str, Any] = {MASTER: chunk.bucket.shards[param]}
        for key, value in values.items():
            if is_per_element(key, value, param if whole else master):
                value = value.reshape(-1)[slice(*chunk.bucket.part(param))] if whole else value
                value = value.to(master.device, master.dtype if value.is_floating_point() else None)
            own[key] = _copy(value)
        saved_master = own.pop(MASTER)
        if chunk.has_master:
            master.copy_(saved_master)
        if own:
            chunk.optimizer.state[master] = own
    for chunk in chunks:
        chunk.offload_state()


def _require_same_groups(groups: list[ParamGroup], given: StateDict) -> None:
    sizes, given_sizes = ([len(g["params"]) for g in gs] for gs in (groups, given["param_groups"]))
    if sizes != given_sizes:
        raise ValueError(
            f"the state is of groups of {given_sizes} parameters, this optimizer has groups of {sizes}"
        )
    unexpected = sorted(given["state"].keys() - set(range(sum(sizes))))
    if unexpected:
        raise ValueError(f"the state is of parameters {unexpected}, this optimizer has {sum(sizes)}")


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
