"""Parameter groups, learning rate, and the gradient norm of the whole model, whichever ranks hold its parts."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from minipar.mesh import placement_of

BETAS = (0.9, 0.95)  # of AdamW


def learning_rate(step: int, steps: int, highest: float, warmup: int) -> float:
    """The learning rate of a step: a linear warmup, then half a cosine down to a tenth of `highest`."""
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return highest * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def parameter_groups(named_parameters, weight_decay: float) -> list[dict]:
    """Split the parameters into matrices, with weight decay, and vectors (norms), without."""
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    is_matrix = {name: len(_shape(p)) >= 2 for name, p in named}
    return [
        {"params": [p for name, p in named if is_matrix[name]], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not is_matrix[name]], "weight_decay": 0.0},
    ]


def _shape(param: nn.Parameter) -> tuple[int, ...]:
    """The shape of the one-process parameter: a flat shard of a matrix counts as a matrix."""
    placement = getattr(param, "placement", None)
    return tuple(param.shape) if placement is None else placement.global_shape


def clip_grad_norm_(
    params: Iterable[nn.Parameter], max_norm: float, comm=None, shares: list[float] | None = None
) -> torch.Tensor:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`; return the norm before.

    params  this rank's, each with its placement (without `comm` none is needed)
    comm    all ranks that hold parts of the model; None: this process holds all of it
    shares  `norm_shares(params, comm)`, if computed before: it does not change between steps

        norm^2 = sum over ranks and parameters of share * |grad|^2

    Where the norm is inf or nan, nothing is scaled. Sends one number, and one per parameter where `shares` is None.
    """
    params = [p for p in params if p.grad is not None or (comm is not None and p.requires_grad)]
    squares = [p.new_zeros((), dtype=torch.float64) if p.grad is None else _square(p.grad) for p in params]
    if comm is not None:
        shares = norm_shares(params, comm) if shares is None else shares
        squares = [square * share for square, share in zip(squares, shares)]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    if comm is not None:
        total = comm.all_reduce(total)
    norm = total.sqrt()
    if torch.isfinite(norm) and norm > max_norm:
        for p in params:
            if p.grad is not None:
                p.grad.mul_((max_norm / (norm + 1e-6)).to(p.grad.dtype))
    return norm


def _square(grad: torch.Tensor) -> torch.Tensor:
    """The squared norm, in float64: how the tensor was cut then changes the rounding only."""
    return torch.linalg.vector_norm(grad, dtype=torch.float64).square()


def norm_shares(params: list[nn.Parameter], comm) -> list[float]:
    """The fraction of each parameter's square that this rank counts: 1 / the number of ranks that hold the same part.

    A parameter that several ranks of `comm` hold thus counts once, an expert's too. A tied copy counts nothing: its
    original has the same gradient and counts in full. (Counting half of each would be wrong under ZeRO, where the two
    are in different buckets and cut at different places.)
    """
    placements = [placement_of(p) for p in params]
    parts = [repr((p.tied_to, *p.part)).encode() for p in placements]
    digests = torch.tensor([zlib.crc32(part) << 31 | zlib.adler32(part) for part in parts], dtype=torch.int64)
    digests = digests.to(comm.device)
    lengths = comm.all_gather(torch.tensor([len(digests)], device=comm.device), algorithm="ring").tolist()
    holders = Counter(comm.all_gather(digests, sizes=lengths).tolist())
    return [0.0 if p.tied_to else 1 / holders[digest] for p, digest in zip(placements, digests.tolist())]
