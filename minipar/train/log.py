"""The metrics of a run, written after every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from minipar.support.atomic_files import write_whole

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
Metrics = dict[str, float]  # the metrics of one step


class MetricsLog:
    """Write one line of JSON per step to the folder's metrics.jsonl; with `tensorboard`, also TensorBoard events.

    begin  the next step to log. Existing lines of earlier steps are kept; lines from `begin` on, of a run that was
           interrupted, are removed, and TensorBoard is told to leave out its events from `begin` on

    Raises ValueError if `tensorboard` is requested and not installed.
    """

    def __init__(self, folder: Path, tensorboard: bool = False, begin: int = 0):
        path = folder / METRICS
        kept = [line for line in read_metrics(folder) if line["step"] < begin]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._events = _event_writer(folder, begin) if tensorboard else None
        self._file = path.open("a", buffering=1)

    def __call__(self, metrics: Metrics) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        if self._events is not None:
            for name, value in metrics.items():
                if name != "step":
                    self._events.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(folder: Path) -> list[Metrics]:
    """Read the lines written so far, except an incomplete last line."""
    path = folder / METRICS
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _event_writer(folder: Path, begin: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard=True, and it is not installed; pip install tensorboard") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=begin)
