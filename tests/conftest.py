"""For every test: drawn examples that repeat, one thread, no windows, GPU tests only where there are GPUs."""

import os

os.environ["MPLBACKEND"] = "Agg"

import pytest
import torch
from hypothesis import HealthCheck, settings

# Real ranks answer in their own time: neither a deadline nor a slow draw says anything about the code. Nor does it that
# of the layouts one can draw for a model few are legal.
_IRRELEVANT = [HealthCheck.too_slow, HealthCheck.filter_too_much]
_SHARED = dict(deadline=None, print_blob=True, database=None, suppress_health_check=_IRRELEVANT)
settings.register_profile("default", derandomize=True, max_examples=25, **_SHARED)
settings.register_profile("slow", max_examples=200, **_SHARED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skip `@pytest.mark.nccl(n)` where fewer than n GPUs (2 unless told) are here."""
    gpus = torch.cuda.device_count()
    for item in items:
        if (mark := item.get_closest_marker("nccl")) is not None:
            needed = mark.args[0] if mark.args else 2
            if gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, this machine has {gpus}"))
