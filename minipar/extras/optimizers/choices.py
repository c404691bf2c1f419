"""The choices "lamb" and "muon" of `--optimizer`. Imports no torch."""

from __future__ import annotations

from typing import Any

from minipar.support.registry import Choice


class Unpriced(Choice):
    """An optimizer that the planner treats as AdamW."""

    unpriced = ""


class MuonChoice(Unpriced):
    """Muon, which needs unsharded matrices."""

    def check(self, config: Any) -> None:
        if config.tp > 1:
            raise ValueError(
                f"optimizer=muon needs whole matrices, and tp={config.tp} cuts them; use tp=1, or adamw"
            )
        if config.zero == 3:
            raise ValueError(
                "optimizer=muon needs whole matrices, and zero=3 cuts them; use zero=1 or 2, which give each matrix to a "
                "rank"
            )


LAMB = Unpriced(
    "minipar.extras.optimizers.families:LAMB",
    "Adam with each parameter's step scaled to the parameter's norm, for large batches",
)
MUON = MuonChoice(
    "minipar.extras.optimizers.families:MUON",
    "a matrix's momentum is orthogonalized; with zero 1 or 2, on the one rank that owns the matrix",
)
