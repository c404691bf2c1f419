"""torch's global state, reset between two calls, so that no earlier function changes what the next one computes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn, mha, mkldnn

# What has an attribute `fp32_precision`, those first from which others inherit it.
_PRECISIONS: list[Any] = [torch.backends, cudnn, mkldnn, cuda.matmul] + [
    getattr(of, name, None) for of in (cudnn, mkldnn) for name in ("matmul", "conv", "rnn")
]
_ATTRIBUTES: list[tuple[Any, tuple[str, ...]]] = [
    (cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
    (cuda.matmul, ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")),
    (mkldnn, ("enabled", "deterministic", "allow_tf32")),
    (torch.utils.deterministic, ("fill_uninitialized_memory",)),
]
# (getter, setter)
_FUNCTIONS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    # This setter imports a compiler, which takes a second: `reset` calls it only if the value differs.
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
]
for _device in ("cpu", "cuda"):
    _FUNCTIONS += [
        (partial(torch.is_autocast_enabled, _device), partial(torch.set_autocast_enabled, _device)),
        (partial(torch.get_autocast_dtype, _device), partial(torch.set_autocast_dtype, _device)),
    ]


class TorchState:
    """The settings of a fresh process. `reset` restores those that differ, and seeds the random generators with 0."""

    def __init__(self) -> None:
        self._precisions = [(of, of.fp32_precision) for of in _PRECISIONS if hasattr(of, "fp32_precision")]
        self._attributes = [(of, name, getattr(of, name)) for of, names in _ATTRIBUTES for name in names]
        self._values = [(get, set_to, get()) for get, set_to in _FUNCTIONS]

    def reset(self) -> None:
        self._reset_precisions()  # else torch refuses to read older settings, which contradict these
        for of, name, value in self._attributes:
            if _differs(partial(getattr, of, name), value):
                setattr(of, name, value)
        for get, set_to, value in self._values:
            if _differs(get, value):
                set_to(value)
        self._reset_precisions()  # which the older settings have changed
        torch.set_default_device(None)  # any other value, even "cpu", would slow every factory function down
        torch.set_flush_denormal(False)  # torch has no getter for it
        torch.set_num_threads(1)  # ranks share the cores
        for name, hooks in vars(torch.nn.modules.module).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                hooks.clear()
        torch.manual_seed(0)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)

    def _reset_precisions(self) -> None:
        for of, value in self._precisions:
            if of.fp32_precision != value:
                of.fp32_precision = value


def _differs(get: Callable[[], Any], value: object) -> bool:
    try:
        return bool(get() != value)
    except RuntimeError:  # a changed older setting contradicts an `fp32_precision` that is reset already
        return True
