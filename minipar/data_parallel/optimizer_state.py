"""Saving and loading a sharded optimizer's state: {"state": {number: {key: value}}, "param_groups": [...]}, as in torch.

    full    gathered: the state that torch's own optimizer would have, which any number of ranks can load
    own     this rank's part of each value, and under "parts" its range; only a rank with the same part can load it

Where the optimizer keeps master weights, the state also has them, under "master".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minipar.data_parallel.arguments import ParamGroup
from minipar.data_parallel.chunk_optimizer import MASTER, ChunkOptimizer, is_per_element
from minipar.data_parallel.sharded_bucket import ShardedBucket
from minipar.mesh import placement_of

Chunks = list[ChunkOptimizer[ShardedBucket]]
StateDict = dict[str, Any]


def full_state_dict(chunks: Chunks, groups: list[ParamGroup]) -> StateDict:
    """Return the full state, on every rank, on the CPU.

    Sends one all-gather per bucket and key: K (p-1)/p P elements for K keys.
    """
    numbers = _param_indices(groups)
    state: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        chunk.refresh_masters()
        for key in _per_element_keys(chunk):
            for param, value in _gather_state(chunk, key):
                state.setdefault(numbers[param], {})[key] = value
        for param, master in chunk.masters.items():
            for key, value in chunk.optimizer.state.get(master, {}).items():
                if not is_per_element(key, value, master):
                    state.setdefault(numbers[param], {})[key] = _copy(value)
    return {"state": dict(sorted(state.items())), "param_groups": _packed(groups)}


def own_state_dict(chunks: Chunks, groups: list[ParamGroup]) -> StateDict:
    """Return this rank's part of the state. As in torch, its tensors are the optimizer's own, and change with it."""
    numbers = _param_indices(groups)
    state: dict[int, dict[str, Any]] = {}
    parts: dict[int, dict[str, int]] = {}
    for chunk in chunks:
        chunk.refresh_masters()
        for param, master in chunk.masters.items():
            own = dict(chunk.optimizer.state.get(master, {}))
            if chunk.has_master:
                own[MASTER] = master.detach()
            if own:
                state[numbers[param]] = own
            parts[numbers[param]] = _part(chunk, param)
    return {"state": dict(sorted(state.items())), "param_groups": _packed(groups), "parts": parts}


def _part(chunk: ChunkOptimizer[ShardedBucket], param: nn.Parameter) -> dict[str, int]:
    start, end = chunk.bucket.part(param)
    return {"rank": chunk.bucket.comm.rank, "size": chunk.bucket.comm.size, "start": start, "end": end}


def _packed(groups: list[ParamGroup]) -> list[ParamGroup]:
    """Return the groups with the parameters' numbers in place of the parameters."""
    numbers = _param_indices(groups)
    packed = [{key: _copy(value) for key, value in group.items() if key != "params"} for group in groups]
    return [
        {**options, "params": [numbers[p] for p in group["params"]]} for options, group in zip(packed, groups)
    ]


def _per_element_keys(chunk: ChunkOptimizer[ShardedBucket]) -> list[str]:
    """Return the keys of the states with one entry per element: the same on all ranks, as empty shards are updated too."""
    keys = [MASTER] if chunk.has_master else []
    for master in chunk.masters.values():
        for key, value in chunk.optimizer.state.get(master, {}).items():
            if key not in keys and is_per_element(key, value, master):
                keys.append(key)
    return keys


def _gather_state(chunk: ChunkOptimizer[ShardedBucket], key: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (parameter, its full state `key`)."""
    bucket = chunk.bucket
    values = {
        param: master if key == MASTER else chunk.optimizer.state.get(master, {}).get(key)
        for param, master in chunk.masters.items()
    }
    values = {param: value for param, value in values.items() if value is not None}
    own = torch.zeros_like(bucket.own, dtype=next(iter(values.values())).dtype)
    for param, value in values.items():
        bucket.slice_of_chunk(param, own).copy_(value.detach())
    flat = bucket.comm.all_gather(own, bucket.sizes).cpu()
    for param in values:
        start, _ = bucket.layout[param]
        yield param, flat[start : start + param.numel()].view(param.shape).clone()


def load_full_state_dict(chunks: Chunks, groups: list[ParamGroup], full: StateDict) -> None:
    """Load this rank's part of a full state, made on any number of ranks, or by torch's own optimizer. Sends nothing.

    Raises ValueError if groups, parameters or shapes differ; for a shape, the error names the parameter.
    """
    _require_same_groups(groups, full)
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
    numbers = _param_indices(groups)
    here = {numbers[p]: (_part(chunk, p), placement_of(p).name) for chunk in chunks for p in chunk.masters}
    for number in sorted(here.keys() | own["parts"].keys()):
        part, name = here.get(number, (None, f"parameter {number}"))
        if own["parts"].get(number) != part:
            raise ValueError(
                f"the state's part of {name} is {_in_words(own['parts'].get(number))}, this rank's is {_in_words(part)}; "
                "to change ranks or buckets use full_state_dict and load_full_state_dict"
            )
    _load(chunks, groups, own, whole=False)


def _in_words(part: dict[str, int] | None) -> str:
    return (
        "elements {start} to {end}, of rank {rank} of {size}".format(**part)
        if part
        else "none (it is not trained)"
    )


@torch.no_grad()
def _load(chunks: Chunks, groups: list[ParamGroup], given: StateDict, whole: bool) -> None:
    numbers = _param_indices(groups)
    for chunk in chunks:
        for param, master in chunk.masters.items():
            for key, value in given["state"].get(numbers[param], {}).items():
                _require_shape(key, value, param, param if whole else master)
    for group, options in zip(groups, given["param_groups"]):
        group.update({k: _copy(v) for k, v in options.items() if k not in ("params", "param_names")})
    for chunk in chunks:
        chunk.optimizer.state.clear()
        for param, master in chunk.masters.items():
            part = slice(*chunk.bucket.part(param)) if whole else slice(None)
            own = {
                key: _as_state_of(master, value.reshape(-1)[part])
                if is_per_element(key, value, param if whole else master)
                else _copy(value)
                for key, value in given["state"].get(numbers[param], {}).items()
            }
            saved_master = own.pop(MASTER, chunk.bucket.shards[param])
            if chunk.has_master:
                master.copy_(saved_master)
            if own:
                chunk.optimizer.state[master] = own
        chunk.offload_state()


def _as_state_of(master: Tensor, value: Tensor) -> Tensor:
    """Return a copy of `value` on the master weight's device and in its dtype."""
    return value.detach().to(master.device, master.dtype if value.is_floating_point() else None, copy=True)


def _require_same_groups(groups: list[ParamGroup], given: StateDict) -> None:
    sizes, given_sizes = ([len(g["params"]) for g in gs] for gs in (groups, given["param_groups"]))
    if sizes != given_sizes:
        raise ValueError(
            f"the state is of groups of {given_sizes} parameters, this optimizer has groups of {sizes}"
        )
    unexpected = sorted(given["state"].keys() - set(range(sum(sizes))))
    if unexpected:
        raise ValueError(f"the state is of parameters {unexpected}, this optimizer has {sum(sizes)}")


def _require_shape(key: str, value: object, param: nn.Parameter, like: Tensor) -> None:
    if isinstance(value, Tensor) and value.dim() and value.shape != like.shape:
        raise ValueError(
            f"{key} of {placement_of(param).name} has shape {tuple(value.shape)}, "
            f"this optimizer's {tuple(like.shape)}"
        )


def _param_indices(groups: list[ParamGroup]) -> dict[nn.Parameter, int]:
    params = [p for group in groups for p in group["params"]]
    return {param: i for i, param in enumerate(params)}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
