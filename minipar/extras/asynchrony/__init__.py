"""Gradients applied later than they were computed, so that nobody waits for messages. In reading order:

delayed.py  the optimizer that applies the gradients of `delay` steps before, on a mesh and in one process
choices.py  the choice "delayed" of `--compress`, and which configurations it refuses

Asynchronous pipelines are in minipar/extras/pipelines.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"delayed": ["DelayedOptimizer", "largest_stable_rate"]}
)
