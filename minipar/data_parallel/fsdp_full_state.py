"""From full parameters to shards and back: making shards, the full state dict, and unsharding all parameters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minipar.data_parallel.flat_parameters import FlatParameters
from minipar.mesh import Placement, placement_of

if TYPE_CHECKING:
    from minipar.data_parallel.fsdp import FSDP

Init = Callable[[str, tuple[int, ...]], Tensor]  # (canonical name, shape) -> the parameter's value
InitPart = Callable[[Placement], Tensor]  # Placement -> the value of the part that it describes


def init_shards(flat: FlatParameters, init: Init | None, init_part: InitPart | None, axis: str) -> None:
    """Shard rank 0's parameters. For parameters on the meta device, shard values that `init` or `init_part` makes."""
    if not any(p.is_meta for p in flat.params):
        flat.cut(axis)
        return
    if init is None and init_part is None:
        name = next(flat.names[p] for p in flat.params if p.is_meta)
        raise ValueError(
            f"{name} is on the meta device and init is None; pass init=(canonical name, shape) -> value"
        )
    ranges = {p: (0, flat.num_elems[p]) if flat.whole else flat.part(p) for p in flat.params}
    placements = {p: placement_of(p).flatten_range(*ranges[p]) for p in flat.params}

    def part_of(param: nn.Parameter) -> Tensor:
        placement = placements[param]
        if init_part is not None:
            return init_part(placement)
        assert init is not None
        return placement.slice_of(init(placement.name, placement.global_shape))

    flat.cut(axis, part_of)


def require_values_of_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"the buffer {name} is on the meta device; give it a value before the module is wrapped"
            )


def gather_parameters(flat: FlatParameters) -> dict[nn.Parameter, Tensor]:
    """Return the full parameters in their own dtype, as new tensors if they are sharded. Sends (p-1)/p n elements."""
    full = flat.shard.to(flat.device)
    if flat.comm is not None:
        full = flat.comm.all_gather(full)
    return {p: full[i : i + flat.num_elems[p]].view(flat.shapes[p]) for p, i in flat.starts.items()}


@torch.no_grad()
def full_state_dict(fsdp: FSDP) -> dict[str, Tensor]:
    """Return the full state dict on the CPU, all-gathering one flat buffer at a time. Tied names share memory."""
    values = {}
    for flat in fsdp.flats:
        values.update({p: value.to("cpu", copy=True) for p, value in gather_parameters(flat).items()})
    state = fsdp.module.state_dict(keep_vars=True)
    return {
        name: values[x] if isinstance(x, nn.Parameter) else x.detach().to("cpu", copy=True)
        for name, x in state.items()
    }


@torch.no_grad()
def load_full_state_dict(fsdp: FSDP, state: dict[str, Tensor]) -> None:
    own = fsdp.module.state_dict(keep_vars=True)
    shape_of = {
        name: fsdp.reducer.gradients_of[x].flat.shapes[x] if isinstance(x, nn.Parameter) else tuple(x.shape)
        for name, x in own.items()
    }
    _check(state, shape_of)
    for flat in fsdp.flats:
        flat.reshard()  # an unsharded copy would still have the old values
    for name, x in own.items():
        if isinstance(x, nn.Parameter):
            flat = fsdp.reducer.gradients_of[x].flat
            low, high = (0, flat.num_elems[x]) if flat.whole else flat.part(x)
            flat.shard_views[x].view(-1).copy_(state[name].reshape(-1)[low:high])
        else:
            x.copy_(state[name])


def _check(state: dict[str, Tensor], shape_of: dict[str, tuple[int, ...]]) -> None:
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
def full_parameters(fsdp: FSDP, writeback: bool) -> Iterator[None]:
    """Unshard all parameters at once, which takes a whole model's memory. On exit, if `writeback`, update the shards."""
    with torch.no_grad():
        full = {
            p: value for flat in fsdp.flats for p, value in gather_parameters(flat).items() if not flat.whole
        }
    gradients = {param: param.grad for param in full}
    for param, value in full.items():
        param.grad = None
        param.data = value
    try:
        yield
    finally:
        for param, value in full.items():
            flat = fsdp.reducer.gradients_of[param].flat
            low, high = flat.part(param)
            if writeback:
                flat.shard_views[param].copy_(value.reshape(-1)[low:high])
            param.data = flat.shard_views[param]
            param.grad = gradients[param]
        for flat in fsdp.flats if writeback else ():
            flat.reshard()  # an unsharded copy would still have the old values
