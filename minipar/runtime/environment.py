"""What the launcher tells a process. Imports no torch."""

from __future__ import annotations

import os

MAX_RANKS = 64  # of a local pool


def under_torchrun() -> bool:
    """Was this process started as a rank of torchrun's?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_per_node() -> int:
    """How many of torchrun's ranks are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
