"""Parameter groups, learning rate, and norms of gradients and parameters that are spread over ranks in any way."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.data_parallel import ZeroOptimizer
from minipar.data_parallel.loss_scaler import DynamicLossScaler
from minipar.mesh import placement_of, require_no_part
from minipar.support.staging import to_device

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig
    from minipar.mesh import Mesh

NamedParameters = Iterable[tuple[str, Tensor]]
Group = dict[str, Any]  # a parameter group, as torch's optimizers take it
BETAS = (0.9, 0.95)  # AdamW's betas


def learning_rate(step: int, steps: int, highest: float, warmup: int) -> float:
    """Return the learning rate of a step: a linear warmup, then half a cosine down to a tenth of `highest`."""
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return highest * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(config: TrainConfig, optimizer: Any, step: int) -> float:
    """Give the optimizer the run's learning rate of this step; return it."""
    lr = learning_rate(step, config.steps, config.highest_lr, config.warmup)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


class OptimizerFamily(Protocol):
    """The interface of a choice of `--optimizer`: an optimizer class for one process, and one for any mesh.

    zero_class  the ZeroOptimizer class that can shard the optimizer's state
    """

    zero_class: type[ZeroOptimizer]

    def groups(self, named_parameters: NamedParameters, weight_decay: float) -> list[Group]:
        """Split the parameters into groups with options of their own."""

    def optimizer_class(self, mesh: Mesh | None = None) -> type[torch.optim.Optimizer]:
        """Return the optimizer's class: for one process, or for this rank's parts of the parameters on a mesh."""

    def bucket_sizes(self, config: TrainConfig) -> dict[str, Any]:
        """Return ZeroOptimizer's bucket sizes."""


class AdamW:
    """AdamW, with weight decay on matrices."""

    zero_class = ZeroOptimizer

    def groups(self, named_parameters: NamedParameters, weight_decay: float) -> list[Group]:
        """Split the parameters into matrices, with weight decay, and vectors (norms), without weight decay."""
        trained = [p for _, p in named_parameters if p.requires_grad]
        matrices = [p for p in trained if is_matrix(p)]
        vectors = [p for p in trained if not is_matrix(p)]
        return [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    def optimizer_class(self, mesh: Mesh | None = None) -> type[torch.optim.Optimizer]:
        return torch.optim.AdamW

    def bucket_sizes(self, config: TrainConfig) -> dict[str, Any]:
        return {"bucket_mb": config.bucket_mb}


ADAMW = AdamW()


def is_matrix(param: Tensor) -> bool:
    """Return whether the unsharded parameter is a matrix: a flat shard of a matrix counts as a matrix."""
    placement = getattr(param, "placement", None)
    return len(param.shape if placement is None else placement.global_shape) >= 2


def clip_grad_norm_(
    params: Tensor | Iterable[Tensor],
    max_norm: float,
    comm: Comm | None = None,
    shares: list[float] | None = None,
) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`; return the norm before scaling.

    params  this rank's parameters, each with its placement (not needed without `comm`); or one of them
    comm    all ranks that hold parts of the model; None: this process holds all of it
    shares  `norm_shares(params, comm)` of the same params, if already computed: it does not change between steps

        norm^2 = sum over ranks and parameters of share * |grad|^2

    If the norm is inf or nan, nothing is scaled. Sends one number, plus one per parameter if `shares` is None.
    Raises ValueError if `comm` is None and a parameter's placement says that this process holds only a part of it, and if
    there is not one share per parameter.
    """
    params = [params] if isinstance(params, Tensor) else list(params)
    norm = grad_norm(params, comm, shares)
    # A branch would wait for the GPU, so the factor is 1 where nothing is to be scaled.
    is_clipped = torch.isfinite(norm) & (norm > max_norm)
    factor = torch.where(is_clipped, max_norm / (norm + 1e-6), 1.0)
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in (p.grad for p in params if p.grad is not None):
        lists.setdefault((grad.device, grad.dtype), []).append(grad)
    for kind, grads in lists.items():
        torch._foreach_mul_(grads, factor.to(*kind))
    return norm


def grad_norm(
    params: Tensor | Iterable[Tensor], comm: Comm | None = None, shares: list[float] | None = None
) -> Tensor:
    """Return the norm of the gradients over the whole model; arguments and errors as in `clip_grad_norm_`."""
    params = [params] if isinstance(params, Tensor) else list(params)
    if comm is None:
        require_no_part(params, "clip_grad_norm_(params, max_norm, comm) or grad_norm(params, comm)")
    counts = [p.grad is not None or (comm is not None and p.requires_grad) for p in params]
    if shares is not None:
        if len(shares) != len(params):
            raise ValueError(
                f"shares has {len(shares)} numbers for {len(params)} parameters; use norm_shares(params, comm)"
            )
        shares = [share for share, own in zip(shares, counts) if own]
    params = [p for p, own in zip(params, counts) if own]
    squares = squared_norms([p.new_zeros(1) if p.grad is None else p.grad for p in params])
    if comm is not None:
        shares = norm_shares(params, comm) if shares is None else shares
        squares = squares.to(comm.device) * to_device(torch.tensor(shares, dtype=torch.float64), comm.device)
    total = squares.sum()
    return (total if comm is None else comm.all_reduce(total)).sqrt()


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """Return the tensors' squared norms [n], in float64, so that cutting a tensor changes only the rounding of the sum."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    # As plain tensors, since the norm of a ShardGradient raises.
    plain = [x.as_subclass(Tensor) for x in tensors]
    return torch.stack(torch._foreach_norm(plain, 2, torch.float64)).square()


def norm_shares(params: list[Tensor], comm: Comm, count_tied: bool = False) -> list[float]:
    """Return the fraction of each parameter's square that this rank counts: 1 / the number of ranks with the same part.

    So a parameter that several ranks of `comm` hold, such as an expert's, counts once in total. Parameters with the same
    name and part on one rank are different ones (of two models, say). Raises ValueError, on every rank, if the ranks that
    hold them have different numbers of them.
    Unless `count_tied`, a tied copy counts 0, because its original has the same gradient and counts in full. (Counting half
    of each would be wrong under ZeRO, because the two are in different buckets and cut at different offsets.)
    """
    placements = [placement_of(p) for p in params]
    parts = [repr((p.tied_to, *p.part)).encode() for p in placements]
    # All empty parts have the digest 0: how many a rank has does not matter.
    of_parts = [p.numel() and zlib.crc32(part) << 31 | zlib.adler32(part) for p, part in zip(params, parts)]
    digests = torch.tensor(of_parts, dtype=torch.int64, device=comm.device)
    lengths = comm.all_gather(torch.tensor([len(digests)], device=comm.device), algorithm="ring").tolist()
    gathered = iter(comm.all_gather(digests, sizes=lengths).tolist())
    of_ranks = [Counter(islice(gathered, length)) for length in lengths]
    names = dict(zip(digests.tolist(), (p.name for p in placements)))
    holders: dict[int, list[int]] = {}
    for rank, counts in enumerate(of_ranks):
        for digest, number in counts.items():
            numbers = holders.setdefault(digest, [])
            numbers.append(number)
            if digest and number != numbers[0]:
                name = names.get(digest, "another rank's")
                raise ValueError(
                    f"a rank has {numbers[0]} parameters named {name}, and rank {rank} has {number}, so copies cannot "
                    "be told apart; give each model's parameters other names, or clip model by model"
                )
    return [
        0.0 if p.tied_to and not count_tied else 1 / len(holders[digest])
        for p, digest in zip(placements, digests.tolist())
    ]


# Whether to step ----------------------------------------------------------------------------------------------------


class NotFinite(ArithmeticError):
    """The error of a step whose loss or gradient norm is not finite. Every rank raises it, since all have the same ones."""


def make_scaler(config: TrainConfig, comm: Comm | None = None) -> DynamicLossScaler | None:
    """Return a loss scaler for float16, None for other dtypes. It lowers the scale only at a second overflow."""
    return DynamicLossScaler(comm, config.loss_scale, hysteresis=2) if config.dtype == "float16" else None


def may_step(
    config: TrainConfig, step: int, loss: float, norm: float, scaler: DynamicLossScaler | None
) -> bool:
    """Return whether loss and gradient norm are finite, so that the step may be taken. Updates the loss scale.

    The scale is halved if gradients overflow while the loss is finite, down to 1.

    Raises NotFinite if they are not finite, unless on_nan is "skip" or a smaller loss scale may help.
    """
    finite = math.isfinite(loss) and math.isfinite(norm)
    overflowed = scaler is not None and math.isfinite(loss) and not finite and scaler.current_scale > 1
    if not finite and not overflowed and config.on_nan == "stop":
        raise NotFinite(
            f"step {step}: the loss is {loss} and the gradient norm {norm}; "
            "lower lr, or go on without such steps by on_nan=skip"
        )
    if scaler is not None and (finite or overflowed):  # a loss that is nan says nothing about the scale
        scaler.update(finite)
    return finite
