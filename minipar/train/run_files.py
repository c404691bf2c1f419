"""The files that the ranks of a run write together: checkpoints, and parameters to compare and to generate text with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from minipar.comm import Comm
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.train_config import TrainConfig
from minipar.train.checkpoint.restore import Checkpoint, CheckpointRef
from minipar.train.checkpoint.saver import Saver, checkpoint_path
from minipar.train.data.text import TextId
from minipar.train.parallelize import RankState
from minipar.train.state import BUFFER, PARAMETER, described, parts_of
from minipar.train.text_generation import sample_text

PARAMETERS = ".parameters"  # a subfolder of the run's folder, while it runs
SAMPLE_TOKENS = 150
Stop = Callable[[], bool]  # whether the run has been asked to stop


class RunFiles:
    """Files that the ranks of a run write together: checkpoints, and parameters for the comparison and for the sample."""

    def __init__(
        self, world: Comm, config: TrainConfig, state: RankState, start: CheckpointRef | None, text_id: TextId
    ) -> None:
        self._world, self._config, self._state = world, config, state
        self._step_of_parameters, self._text_id = 0, text_id
        self._saver: Saver | None = None
        if config.checkpoint_every:
            resumed = start and start.path
            wait = config.choice("offload").load().waits_for_saves
            self._saver = Saver(world, config.folder / CHECKPOINTS, config.keep, wait, resumed)

    def after(self, step: int, stop: Stop) -> bool:
        """Save the state after `step` steps if a checkpoint is due or the run ends; else poll the save in progress.

        Returns whether the run ends early, because `stop()` is true on a rank; this takes an all-reduce of 8 bytes.
        """
        every, steps = self._config.checkpoint_every, self._config.steps
        if self._saver is None:
            return False
        stopped = step < steps and self._saver.any_rank(stop())
        if step % every and step < steps and not stopped:
            self._saver.poll()
            return False
        parts, numbers = parts_of(self._state)
        parts += self._state.averaging.stored_parts(self._state)
        extra = described(self._config, self._text_id, step)
        if self._state.scaler is not None:
            extra["loss_scaler"] = self._state.scaler.state_dict()
        self._saver.save(step, parts, extra, numbers)
        if step == steps or stopped:
            self.finish()
        return stopped

    def finish(self) -> None:
        """Wait for the save in progress, if any. All ranks must call it."""
        if self._saver is not None:
            self._saver.finish()

    def parameters(self, step: int) -> CheckpointRef | None:
        """Write only the parameters, and tell rank 0 where `train` can read them: no rank has memory for all of them."""
        saver = Saver(self._world, self._config.folder / PARAMETERS, keep=0, wait=True)
        parts = [part for part in parts_of(self._state)[0] if part.kind in (PARAMETER, BUFFER)]
        saver.save(step, parts, described(self._config, self._text_id))
        self._step_of_parameters = step
        return None if self._world.rank else Checkpoint(self._path(PARAMETERS, step)).chosen

    def sample(self, verified: CheckpointRef | None) -> str | None:
        """Generate a text sample for rank 0, from the last checkpoint or else from parameters that are written for it."""
        config, steps = self._config, self._config.steps
        path = self._path(CHECKPOINTS if self._saver else PARAMETERS, steps)
        if self._saver is None and self._step_of_parameters != steps:
            self.parameters(steps)
        text = sample_text(self._world, config, path, SAMPLE_TOKENS)
        if self._world.rank == 0 and verified is None:
            shutil.rmtree(config.folder / PARAMETERS, ignore_errors=True)
        return text

    def _path(self, folder: str, step: int) -> Path:
        return checkpoint_path(self._config.folder / folder, step)
