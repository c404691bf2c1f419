"""The metrics of a run, written as they come."""

from __future__ import annotations

import json
from pathlib import Path

from minipar.train.atomic_files import write_whole

METRICS = "metrics.jsonl"


class MetricsLog:
    """A line of JSON a step, in the folder's metrics.jsonl; with `tensorboard` the same numbers in events of its format.

    begin  the step the run goes on from: lines of earlier steps stay, later ones are of a run that was cut short

    Raises ValueError where `tensorboard` is asked for and not installed.
    """

    def __init__(self, folder: Path, tensorboard: bool = False, begin: int = 0):
        path = folder / METRICS
        kept = [line for line in read_metrics(folder) if line["step"] < begin]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._events = _event_writer(folder) if tensorboard else None
        self._file = path.open("a", buffering=1)

    def __call__(self, metrics: dict) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        if self._events is not None:
            for name, value in metrics.items():
                if name != "step":
                    self._events.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(folder: Path) -> list[dict]:
    """The lines written so far; a last one that was cut short is left out."""
    path = folder / METRICS
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _event_writer(folder: Path):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard=True, and it is not installed; pip install tensorboard") from None
    return SummaryWriter(str(folder / "tensorboard"))
