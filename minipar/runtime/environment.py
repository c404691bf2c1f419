"""The environment variables that torchrun sets. Imports no torch."""

from __future__ import annotations

import os

MAX_RANKS = 64  # in a local pool


def under_torchrun() -> bool:
    """Return whether torchrun started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_per_node() -> int:
    """Return the number of torchrun's ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
