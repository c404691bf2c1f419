"""Evaluation mode for a while, after which every submodule has the mode that it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules in evaluation mode; at the end, restore the mode of each submodule.

    `module.train()` would not restore it: submodules that were in evaluation mode, such as a frozen BatchNorm, would train.
    Nor would `eval()`, which a module may override to do more, such as to merge its weights.
    """
    before = [(submodule, submodule.training) for module in modules for submodule in module.modules()]
    for submodule, _ in before:
        submodule.training = False
    try:
        yield
    finally:
        for submodule, training in before:
            submodule.training = training
