"""The installed schedules by what they are: the core's own, and those of extras where they are installed."""

from __future__ import annotations

from minipar.schedules.registry import SCHEDULES

CHOICES = SCHEDULES.usable()
LOOPED = tuple(name for name, choice in CHOICES.items() if choice.chunks is None)
SLICED = tuple(name for name, choice in CHOICES.items() if choice.sliced)
V_SHAPED = tuple(name for name, choice in CHOICES.items() if choice.v_shaped)
ONE_COPY = tuple(name for name, choice in CHOICES.items() if choice.copies == 1)
WHOLE_SAMPLES = tuple(name for name in ONE_COPY if name not in SLICED)
TWO_COPIES = tuple(name for name, choice in CHOICES.items() if choice.copies == 2)
