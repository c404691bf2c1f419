"""Declares the choice "elastic" of `--membership`, and the command `minipar calibrate`. Imports no torch."""

from __future__ import annotations

from typing import Any

from minipar.support.registry import Choice


class Elastic(Choice):
    """The choice `--membership elastic`: when ranks are lost, the run continues on the remaining ranks."""

    def check(self, config: Any) -> None:
        """Raise ValueError if a run saves no checkpoints, or has losses or a state that depend on the mesh."""
        if not config.checkpoint_every:
            raise ValueError(
                "membership=elastic goes on from checkpoints, and checkpoint_every=0; use 1 or more"
            )
        if config.compress != "none":
            raise ValueError(
                f"membership=elastic may go on with another mesh, and the losses of compress={config.compress} depend on "
                "it; use compress=none"
            )


ELASTIC = Elastic(
    "minipar.extras.run.elastic:train_on_ranks_there_are",
    "under torchrun --nnodes MIN:MAX, continue from the newest checkpoint on the ranks that are left: on this mesh if it "
    "has that many, else on the mesh that the planner predicts to be fastest",
)
CALIBRATE = Choice(
    "minipar.extras.run.calibrate_command:calibrate_command",
    "measure this machine, and write it to a machine file of `minipar plan`",
)
