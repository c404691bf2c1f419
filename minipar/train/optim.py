"""Optimizer, learning rate, and the gradient norm: one number for the model, whatever holds its parts."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from minipar.placement import placement_of

BETAS = (0.9, 0.95)  # of AdamW


def learning_rate(step: int, steps: int, highest: float, warmup: int) -> float:
    """Rises linearly over `warmup` steps, then falls along half a cosine to a tenth of the highest."""
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return highest * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def parameter_groups(named_parameters, weight_decay: float) -> list[dict]:
    """Matrices decay, vectors (norms) do not."""
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    is_matrix = {name: len(_shape(p)) >= 2 for name, p in named}
    return [
        {"params": [p for name, p in named if is_matrix[name]], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not is_matrix[name]], "weight_decay": 0.0},
    ]


def _shape(param: nn.Parameter) -> tuple[int, ...]:
    """Of the one-process parameter: a flat shard of a matrix is still a matrix's."""
    placement = getattr(param, "placement", None)
    return tuple(param.shape) if placement is None else placement.global_shape


def clip_grad_norm_(
    params: Iterable[nn.Parameter], max_norm: float, comm=None, copies: list[int] | None = None
) -> torch.Tensor:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`; return the norm before.

    params  this rank's, each with its placement (without `comm` none is needed)
    comm    all ranks that hold parts of the model; None: this process holds all of it
    copies  `count_copies(params, comm)`, where that was asked before: it stays the same

        norm^2 = sum over ranks and parameters of |grad|^2 / (number of ranks that hold this same part)

    A parameter that several ranks hold is so counted once, an expert in its own group too. A norm of inf or nan scales
    nothing. Sends one number, and if `copies` is not given one per parameter.
    """
    params = [p for p in params if p.grad is not None or (comm is not None and p.requires_grad)]
    squares = [torch.zeros((), dtype=torch.float32) if p.grad is None else _square(p.grad) for p in params]
    if comm is not None and comm.size > 1:
        copies = count_copies(params, comm) if copies is None else copies
        squares = [square / n for square, n in zip(squares, copies)]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float32)
    if comm is not None:
        total = comm.all_reduce(total)
    norm = total.sqrt()
    if torch.isfinite(norm) and norm > max_norm:
        for p in params:
            if p.grad is not None:
                p.grad.mul_((max_norm / (norm + 1e-6)).to(p.grad.dtype))
    return norm


def _square(grad: torch.Tensor) -> torch.Tensor:
    """In float64: so the norm does not depend on how the tensor was cut by more than rounding."""
    return torch.linalg.vector_norm(grad, dtype=torch.float64).square()


def count_copies(params: list[nn.Parameter], comm) -> list[int]:
    """For each parameter, how often the ranks of `comm` hold the same part of the same tensor, tied copies included."""
    placements = [placement_of(p) for p in params]
    parts = [repr((p.tied_to or p.name, p.part[1])).encode() for p in placements]
    digests = torch.tensor([zlib.crc32(part) << 31 | zlib.adler32(part) for part in parts], dtype=torch.int64)
    lengths = comm.all_gather(torch.tensor([len(digests)]), algorithm="ring").tolist()
    everywhere = Counter(comm.all_gather(digests, sizes=lengths).tolist())
    return [everywhere[digest] for digest in digests.tolist()]
