"""A sharded optimizer's state, gathered into the state that torch's own optimizer would have, and loaded from it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minipar.data_parallel.chunk_optimizer import ChunkOptimizer, is_per_element
from minipar.mesh import placement_of

MASTER = "master"  # the key of the optimizer's own copy of a parameter, where it keeps one


def full_state_dict(chunks: list[ChunkOptimizer], groups: list[dict]) -> dict:
    """Return {"state": {parameter number: {key: value}}, "param_groups": [...]}, as torch.optim.Optimizer.state_dict.

    Every rank gets the whole state, on the CPU. Sends one all-gather per bucket and key: K (p-1)/p P elements for K keys.
    """
    numbers = _param_indices(groups)
    state: dict[int, dict] = {}
    for chunk in chunks:
        for key in _per_element_keys(chunk):
            for param, value in _gather_state(chunk, key):
                state.setdefault(numbers[param], {})[key] = value
        for param, master in chunk.masters.items():
            for key, value in chunk.optimizer.state.get(master, {}).items():
                if not is_per_element(key, value, master):
                    state.setdefault(numbers[param], {})[key] = _copy(value)
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    for group, option in zip(groups, options):
        option["params"] = [numbers[p] for p in group["params"]]
    return {"state": dict(sorted(state.items())), "param_groups": options}


def _per_element_keys(chunk: ChunkOptimizer) -> list[str]:
    """Return the keys of states with an entry per element: the same on all ranks, since empty shards are updated too."""
    keys = [MASTER] if chunk.has_master else []
    for master in chunk.masters.values():
        for key, value in chunk.optimizer.state.get(master, {}).items():
            if key not in keys and is_per_element(key, value, master):
                keys.append(key)
    return keys


def _gather_state(chunk: ChunkOptimizer, key: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
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
    flat = bucket.comm.all_gather(own).cpu()
    for param in values:
        start = bucket.starts[param]
        yield param, flat[start : start + param.numel()].view(param.shape).clone()


@torch.no_grad()
def load_full_state_dict(chunks: list[ChunkOptimizer], groups: list[dict], full: dict) -> None:
    """Load this rank's part of a state made by `full_state_dict`, on any number of ranks, or by torch's own optimizer.

    Sends nothing.
    Raises ValueError where groups or parameters differ, or a shape does (naming the parameter).
    """
    _check(groups, full)
    numbers = _param_indices(groups)
    for group, given in zip(groups, full["param_groups"]):
        group.update({k: v for k, v in given.items() if k not in ("params", "param_names")})
    for chunk in chunks:
        chunk.optimizer.state.clear()
        for param, master in chunk.masters.items():
            state = dict(full["state"].get(numbers[param], {}))
            low, high = chunk.bucket.part(param)
            own = {
                key: value.reshape(-1)[low:high].to(master.device, copy=True)
                if is_per_element(key, value, param)
                else _copy(value)
                for key, value in state.items()
            }
            if chunk.has_master:
                master.copy_(own.pop(MASTER, chunk.bucket.shards[param]))
            if own:
                chunk.optimizer.state[master] = own
        chunk.offload_state()


def _check(groups: list[dict], full: dict) -> None:
    sizes, given = ([len(g["params"]) for g in gs] for gs in (groups, full["param_groups"]))
    if sizes != given:
        raise ValueError(
            f"the state is of groups of {given} parameters, this optimizer has groups of {sizes}"
        )
    numbers = _param_indices(groups)
    for param, number in numbers.items():
        for key, value in full["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                raise ValueError(
                    f"{key} of {placement_of(param).name} has shape {tuple(value.shape)}, "
                    f"the parameter {tuple(param.shape)}"
                )
    unexpected = sorted(full["state"].keys() - set(numbers.values()))
    if unexpected:
        raise ValueError(f"the state is of parameters {unexpected}, this optimizer has {len(numbers)}")


def _param_indices(groups: list[dict]) -> dict[nn.Parameter, int]:
    params = [p for group in groups for p in group["params"]]
    return {param: i for i, param in enumerate(params)}


def _copy(value):
    return value.detach().clone() if isinstance(value, Tensor) else value
