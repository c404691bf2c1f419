"""FSDP's parameters unsharded all at once: the full state dict, out and in, and a context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minipar.data_parallel.flat_parameters import FlatParameters
from minipar.data_parallel.fsdp_guards import NoPartialState


def gather_parameters(flat: FlatParameters) -> dict[nn.Parameter, Tensor]:
    """Return the full parameters in their own dtype, as new tensors if they are sharded. Sends (p-1)/p n elements."""
    full = flat.own.to(flat.device)
    if flat.comm is not None:
        full = flat.comm.all_gather(full)
    return {p: flat.slice_of_full(p, full) for p in flat.params}


@torch.no_grad()
def full_state_dict(module: nn.Module, flats: list[FlatParameters]) -> dict[str, Tensor]:
    """Return the full state dict on the CPU, all-gathering one flat buffer at a time. Tied names share memory."""
    values = {}
    for flat in flats:
        values.update({p: value.to("cpu", copy=True) for p, value in gather_parameters(flat).items()})
    state = module.state_dict(keep_vars=True)
    return {
        name: values[x] if isinstance(x, nn.Parameter) else x.detach().to("cpu", copy=True)
        for name, x in state.items()
    }


@torch.no_grad()
def load_full_state_dict(module: nn.Module, flats: list[FlatParameters], state: Mapping[str, Tensor]) -> None:
    own = module.state_dict(keep_vars=True)
    flat_of = {p: flat for flat in flats for p in flat.params}
    shape_of = {
        name: flat_of[x].shapes[x] if isinstance(x, nn.Parameter) else tuple(x.shape)
        for name, x in own.items()
    }
    _check(state, shape_of)
    for flat in flats:
        flat.reshard()  # an unsharded copy would still have the old values
    for name, x in own.items():
        if isinstance(x, nn.Parameter):
            flat = flat_of[x]
            flat.shard_views[x].view(-1).copy_(state[name].reshape(-1)[slice(*flat.part(x))])
        else:
            x.copy_(state[name])


def _check(state: Mapping[str, Tensor], shape_of: dict[str, tuple[int, ...]]) -> None:
    wrong = {
        "missing": [name for name in shape_of if name not in state],
        "unexpected": [name for name in state if name not in shape_of],
        "misshapen": [
            f"{name} {tuple(state[name].shape)}, should be {shape}"
            for name, shape in shape_of.items()
            if name in state and tuple(state[name].shape) != shape
        ],
    }
    if any(wrong.values()):
        what = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        raise ValueError(f"the state dict does not fit the model: {what}")


@contextmanager
def full_parameters(flats: list[FlatParameters], state: NoPartialState, writeback: bool) -> Iterator[None]:
    """Unshard all parameters at once, which takes a whole model's memory. On exit, if `writeback`, update the shards."""
    with torch.no_grad():
        sharded = [(flat, gather_parameters(flat)) for flat in flats if not flat.whole]
    full = {p: value for _, values in sharded for p, value in values.items()}
    gradients = {param: param.grad for param in full}
    for param, value in full.items():
        param.grad = None
        param.data = value
    state.whole = True
    try:
        yield
    finally:
        state.whole = False
        for flat, values in sharded:
            for param, value in values.items():
                low, high = flat.part(param)
                if writeback:
                    flat.shard_views[param].copy_(value.reshape(-1)[low:high])
                param.data = flat.shard_views[param]
                param.grad = gradients[param]
        for flat in flats if writeback else ():
            flat.reshard()  # an unsharded copy would still have the old values
