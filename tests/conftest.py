"""For every test: drawn examples that repeat, one thread, no windows, GPU tests only where there are GPUs.

With MINIPAR_TRANSPORT=grouped, every test on ranks but those marked `tagged` runs by NCCL's rules.
"""

import os

os.environ["MPLBACKEND"] = "Agg"

import pytest
import torch
from hypothesis import HealthCheck, settings

from minipar.runtime.devices import Machine, why_not_nccl

# Real ranks answer in their own time: neither a deadline nor a slow draw says anything about the code. Nor does it that
# of the layouts one can draw for a model few are legal.
_IRRELEVANT = [HealthCheck.too_slow, HealthCheck.filter_too_much]
_SHARED = dict(deadline=None, print_blob=True, database=None, suppress_health_check=_IRRELEVANT)
settings.register_profile("default", derandomize=True, max_examples=25, **_SHARED)
settings.register_profile("slow", max_examples=200, **_SHARED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skip `nccl(n)` where NCCL cannot serve n ranks (2 unless told) here, and `tagged(why)` in grouped runs."""
    grouped, machine = os.environ.get("MINIPAR_TRANSPORT") == "grouped", Machine.here()
    for item in items:
        if grouped and (mark := item.get_closest_marker("tagged")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"about the tagged transport: {mark.args[0]}"))
        if (mark := item.get_closest_marker("nccl")) is not None:
            ranks = mark.args[0] if mark.args else 2
            if why := why_not_nccl(ranks, machine):
                item.add_marker(pytest.mark.skip(reason=f"NCCL {why}"))
