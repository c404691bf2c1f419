"""Parameter groups, learning rate, and norms of whole gradients and parameters, whichever ranks hold their parts."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minipar.data_parallel.lamb import Lamb, trust_ratios
from minipar.data_parallel.muon import ADAMW, Muon
from minipar.data_parallel.tensor_lists import squared_norms
from minipar.mesh import placement_of
from minipar.staging import to_device

BETAS = (0.9, 0.95)  # of AdamW


def learning_rate(step: int, steps: int, highest: float, warmup: int) -> float:
    """The learning rate of a step: a linear warmup, then half a cosine down to a tenth of `highest`."""
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return highest * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def parameter_groups(named_parameters, weight_decay: float, optimizer: str = "adamw") -> list[dict]:
    """Split the parameters into matrices, with weight decay, and vectors (norms), without.

    With optimizer "muon", embeddings and head are a group of their own: as the vectors, they get AdamW's updates.
    """
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    matrices = {p: name for name, p in named if len(_shape(p)) >= 2}
    vectors = {"params": [p for _, p in named if p not in matrices], "weight_decay": 0.0}
    if optimizer != "muon":
        return [{"params": [*matrices], "weight_decay": weight_decay}, vectors]
    hidden = [p for p, name in matrices.items() if ".layers." in f".{name}"]
    ends = [p for p in matrices if p not in set(hidden)]
    return [
        {"params": hidden, "weight_decay": weight_decay, "rule": "muon"},
        {"params": ends, "weight_decay": weight_decay, "rule": ADAMW},
        vectors | {"rule": ADAMW},
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
    params = list(params)
    norm = grad_norm(params, comm, shares)
    # No branch, which would wait for a GPU: the factor is 1 where nothing is to be scaled.
    too_long = torch.isfinite(norm) & (norm > max_norm)
    factor = torch.where(too_long, max_norm / (norm + 1e-6), 1.0)
    lists: dict[tuple, list[Tensor]] = {}
    for grad in (p.grad for p in params if p.grad is not None):
        lists.setdefault((grad.device, grad.dtype), []).append(grad)
    for kind, grads in lists.items():
        torch._foreach_mul_(grads, factor.to(*kind))
    return norm


def grad_norm(params: Iterable[nn.Parameter], comm=None, shares: list[float] | None = None) -> torch.Tensor:
    """The norm of the gradients over the whole model; arguments as in `clip_grad_norm_`."""
    params = [p for p in params if p.grad is not None or (comm is not None and p.requires_grad)]
    squares = squared_norms([p.new_zeros(1) if p.grad is None else p.grad for p in params])
    if comm is not None:
        shares = norm_shares(params, comm) if shares is None else shares
        squares = squares.to(comm.device) * to_device(torch.tensor(shares, dtype=torch.float64), comm.device)
    total = squares.sum()
    return (total if comm is None else comm.all_reduce(total)).sqrt()


def norm_shares(params: list[nn.Parameter], comm, count_tied: bool = False) -> list[float]:
    """The fraction of each parameter's square that this rank counts: 1 / the number of ranks that hold the same part.

    A parameter that several ranks of `comm` hold thus counts once, an expert's too. Unless `count_tied`, a tied copy counts
    nothing: its original has the same gradient and counts in full. (Counting half of each would be wrong under ZeRO, where
    the two are in different buckets and cut at different places.)
    """
    placements = [placement_of(p) for p in params]
    parts = [repr((p.tied_to, *p.part)).encode() for p in placements]
    digests = torch.tensor([zlib.crc32(part) << 31 | zlib.adler32(part) for part in parts], dtype=torch.int64)
    digests = digests.to(comm.device)
    lengths = comm.all_gather(torch.tensor([len(digests)], device=comm.device), algorithm="ring").tolist()
    holders = Counter(comm.all_gather(digests, sizes=lengths).tolist())
    return [
        0.0 if p.tied_to and not count_tied else 1 / holders[digest]
        for p, digest in zip(placements, digests.tolist())
    ]


def optimizer_class(config, mesh=None) -> type[torch.optim.Optimizer]:
    """The class of `config.optimizer`: for one process, or for this rank's parts of the parameters on a mesh."""
    if config.optimizer != "lamb":
        return {"adamw": torch.optim.AdamW, "muon": Muon}[config.optimizer]
    return Lamb if mesh is None else lamb_over(mesh.sharing("dp", "cp", "tp"))


def lamb_over(comm) -> type[Lamb]:
    """Return LAMB for parts of parameters with placements, of which the ranks of `comm` together hold the whole.

    All of `comm` must have parts of the same parameters. A step all-reduces 16 bytes per parameter (two float64).
    """

    class MeshLamb(Lamb):
        def __init__(self, params, comm=None, **options):
            super().__init__(params, **options)  # without ZeRO's Comm, which has only some of the parts
            self._shares: Tensor | None = None

        def _ratios(self, params: list[Tensor], updates: list[Tensor]) -> Tensor:
            parts = [p for group in self.param_groups for p in group["params"]]
            if self._shares is None:
                shares = norm_shares(parts, comm, count_tied=True)
                self._shares = to_device(torch.tensor(shares, dtype=torch.float64), comm.device)
            of_updates = dict(zip(params, squared_norms(updates)))
            of_parts = squared_norms(parts)
            none = of_parts.new_zeros(())
            squares = torch.stack((of_parts, torch.stack([of_updates.get(p, none) for p in parts])))
            totals = comm.all_reduce(squares.to(comm.device) * self._shares).to(of_parts.device)
            of = dict(zip(parts, trust_ratios(totals)))
            return torch.stack([of[p] for p in params]) if params else totals.new_zeros(0)

    return MeshLamb
