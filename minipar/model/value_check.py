"""A check of a tensor's values that no GPU is waited for."""

from __future__ import annotations

import torch
from torch import Tensor


def holds(condition: Tensor, sentence: str) -> bool:
    """Return whether a condition, one boolean, is true; on a GPU, let the GPU assert it, and return True at once.

    Where it is false on a GPU, the process ends at the next value that it reads, with the sentence on stderr, as after an
    index out of range in torch's own embedding. Without values (on the meta device) everything holds.
    """
    if condition.is_cuda:
        torch._assert_async(condition, sentence)
        return True
    return condition.is_meta or bool(condition)
