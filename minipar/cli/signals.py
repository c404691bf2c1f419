"""Ctrl-C and SIGTERM during a run: the first saves the run if it has checkpoints, the second ends it at once."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any, Self

from minipar.support.environment import is_rank_0
from minipar.support.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal has asked the run to stop. Called by the trainer after every step of a run that has checkpoints.

    saves  whether the run can save what it has done; if not, the first signal ends it at once

    As a context it takes the signals, and gives them back.
    """

    def __init__(self, saves: bool) -> None:
        self._saves = saves
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self.signal > 0

    def in_comparison(self) -> None:
        """Raise Stopped if a signal has come. The run is done and saved by then."""
        if self.signal:
            raise Stopped("stopped while the first steps were repeated in one process", self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal or not self._saves:
            end_at_next_signal()
            why = "" if self._saves else "; nothing is saved without --checkpoint-every"
            raise Stopped(f"{name} ended the run{why}" if is_rank_0() else "", number)
        self.signal = number
        if is_rank_0():
            print(
                f"minipar: {name}: saving after this step; a second one ends the run at once", file=sys.stderr
            )


def end_at_next_signal() -> None:
    """Let the next signal end this process at once, and without a word: the first one has been answered."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
