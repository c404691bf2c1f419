"""An assertion about a tensor's values that does not wait for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_async(condition: Tensor, sentence: str) -> bool:
    """Return the value of `condition`, a single boolean. On a GPU, return True at once and let the GPU assert it.

    If the GPU's assertion fails, the process ends when it next reads a value from the GPU, with `sentence` on stderr,
    like torch's embedding for a bad index. On the meta device, return True.
    """
    if condition.is_cuda:
        torch._assert_async(condition, sentence)
        return True
    return condition.is_meta or bool(condition)
