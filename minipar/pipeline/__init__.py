"""Pipelines at work: a schedule of `minipar.schedules`, and one executor that obeys it. In reading order:

partition.py  cut a model into stages
stage.py      one stage at work: forward, backward, its two halves
mailbox.py    results on their way between ranks
tied.py       a weight that the first and the last stage share
execute.py    Pipeline: one executor, which obeys any schedule
measure.py    a run's own timeline, to be drawn beside the simulated one
emulate.py    stages that sleep: a schedule on fewer cores than ranks
pipedream.py  the asynchronous ancestor: stale weights, and stashing

The names of `minipar.schedules` are here too.
"""

import lazy_loader

import minipar.schedules
from minipar.schedules import *  # noqa: F403

_getattr, _dir, _own = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = _getattr
__all__ = sorted([*_own, *minipar.schedules.__all__])  # noqa: PLE0605


def __dir__() -> list[str]:
    return __all__
