"""The installed schedules by what they are: the core's own, and those of extras where they are installed."""

from __future__ import annotations

from minipar.schedules.registry import DRAWN, SCHEDULES

CHOICES = SCHEDULES.usable()
LOOPED = tuple(name for name, choice in CHOICES.items() if choice.chunks is None)
SLICED = tuple(name for name, choice in CHOICES.items() if choice.sliced)
TWO_WAYS = tuple(name for name in DRAWN.usable() if name in ("chimera", "dualpipe"))
WHOLE_SAMPLES = tuple(name for name in CHOICES if name not in SLICED)
