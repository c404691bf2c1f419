"""LAMB and Muon on any mesh, for `--optimizer lamb` and `--optimizer muon`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.extras.optimizers.lamb import Lamb, trust_ratios
from minipar.extras.optimizers.muon import ADAMW, Muon
from minipar.extras.optimizers.whole_parameters import WholeParameterZero
from minipar.mesh import Mesh
from minipar.support.staging import to_device
from minipar.train.optim import AdamW, NamedParameters, is_matrix, norm_shares, squared_norms


class LambFamily(AdamW):
    """LAMB, with the parameter groups of AdamW. Norms are summed over the ranks that hold parts of a parameter."""

    def optimizer_class(self, mesh: Mesh | None = None) -> type[torch.optim.Optimizer]:
        return Lamb if mesh is None else lamb_over(mesh.comm("dp", "cp", "tp"))

    def bucket_sizes(self, config: TrainConfig) -> dict[str, float]:
        """Return sizes with which a bucket has the same parameters on all tp ranks, since norms are summed by bucket.

        If tp splits the vocabulary unevenly, ranks would fill buckets differently, so one bucket holds all parameters.
        """
        if config.model.vocab_size % config.tp:
            return {"bucket_mb": 2.0**20, "first_bucket_mb": 2.0**20}
        return super().bucket_sizes(config)


class MuonFamily(AdamW):
    """Muon for the matrices of the layers; embeddings, head and vectors get AdamW's updates."""

    zero_class = WholeParameterZero

    def groups(self, named_parameters: NamedParameters, weight_decay: float) -> list[dict[str, Any]]:
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        hidden = [p for name, p in named if is_matrix(p) and ".layers." in f".{name}"]
        ends = [p for name, p in named if is_matrix(p) and ".layers." not in f".{name}"]
        vectors = [p for _, p in named if not is_matrix(p)]
        return [
            {"params": hidden, "weight_decay": weight_decay, "rule": "muon"},
            {"params": ends, "weight_decay": weight_decay, "rule": ADAMW},
            {"params": vectors, "weight_decay": 0.0, "rule": ADAMW},
        ]

    def optimizer_class(self, mesh: Mesh | None = None) -> type[torch.optim.Optimizer]:
        return Muon


LAMB, MUON = LambFamily(), MuonFamily()


def lamb_over(comm: Comm) -> type[Lamb]:
    """Return a LAMB class for parameters that are split over the ranks of `comm`, as their placements say.

    All ranks of `comm` must hold parts of the same parameters. A step all-reduces 16 bytes per parameter (two float64).
    """

    class MeshLamb(Lamb):
        def __init__(self, params: ParamsT, comm: Comm | None = None, **options: Any):
            # Do not pass on the argument `comm`: it is ZeRO's Comm, whose ranks hold only some of the parts.
            super().__init__(params, **options)
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
