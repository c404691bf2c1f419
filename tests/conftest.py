"""For every test: drawn examples that repeat, one thread, no windows, GPU tests only where there are GPUs.

`pytest --quick` is what `make test` runs: every claim, on fewer examples. A property draws a fifth of its examples, of the
cases of a test marked `sampled(n)` one in n is run, and what is marked `thorough` is left to `make test-all`.

With MINIPAR_TRANSPORT=grouped, every test on ranks but those marked `tagged` runs by NCCL's rules.
"""

import gc
import os
from collections import Counter
from importlib.metadata import entry_points

os.environ["MPLBACKEND"] = "Agg"

import pytest
import torch
from hypothesis import HealthCheck, settings

from minipar.runtime.devices import Machine, why_not_nccl
from minipar.support import registry
from tests.examples import ALL

# Real ranks answer in their own time: neither a deadline nor a slow draw says anything about the code. Nor does it that
# of the layouts one can draw for a model few are legal.
_IRRELEVANT = [HealthCheck.too_slow, HealthCheck.filter_too_much]
_SHARED = dict(deadline=None, print_blob=True, database=None, suppress_health_check=_IRRELEVANT)
settings.register_profile("quick", derandomize=True, max_examples=ALL // 5, **_SHARED)
settings.register_profile("all", derandomize=True, max_examples=ALL, **_SHARED)
settings.register_profile("slow", max_examples=8 * ALL, **_SHARED)

# Files that take minutes, and notebooks, are begun first: else one worker would run the last of them alone.
LONG = (".ipynb", "test_chaos.py", "test_drawn_configs.py")

torch.set_num_threads(1)


def extras_of_minipar(group):
    """What the tests count does not depend on the other packages that are installed here."""
    return [entry for entry in entry_points(group=group) if entry.dist.name == registry.OURS]


registry.entry_points = extras_of_minipar


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="every claim, on fewer examples: what `make test` runs"
    )


def pytest_configure(config):
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick" if config.option.quick else "all"))


def pytest_collection_modifyitems(config, items):
    if config.option.quick:
        chosen = sampled(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    items.sort(key=lambda item: not item.path.name.endswith(LONG))
    skip_what_cannot_run(items)


def pytest_collection_finish():
    gc.freeze()  # so that no later collection searches torch's modules and thousands of tests


def sampled(items):
    """Return the items of a quick run: none marked `thorough`, and of those marked `sampled(n)` every n-th case.

    The second case of each n: the first is often the trivial one, a single rank.
    """
    chosen, cases = set(), Counter()
    for item in items:
        if item.get_closest_marker("thorough") is not None:
            continue
        if (mark := item.get_closest_marker("sampled")) is not None:
            cases[item.function] += 1
            if cases[item.function] % mark.args[0] != 2 % mark.args[0]:
                continue
        chosen.add(item)
    return chosen


def skip_what_cannot_run(items):
    """Skip `nccl(n)` where NCCL cannot serve n ranks (2 unless told) here, and `tagged(why)` in grouped runs."""
    grouped, machine = os.environ.get("MINIPAR_TRANSPORT") == "grouped", Machine.here()
    for item in items:
        if grouped and (mark := item.get_closest_marker("tagged")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"about the tagged transport: {mark.args[0]}"))
        if (mark := item.get_closest_marker("nccl")) is not None:
            ranks = mark.args[0] if mark.args else 2
            if why := why_not_nccl(ranks, machine):
                item.add_marker(pytest.mark.skip(reason=f"NCCL {why}"))
