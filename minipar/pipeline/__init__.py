"""Pipeline parallelism: one executor for the schedules of `minipar.schedules`. In reading order:

partition.py    cut a model into stages
batch.py        split a batch into microbatches
stage.py        one stage: forward, backward, and the backward's two halves
mailbox.py      messages between stages: activations and gradients
tied.py         sum the gradient of a weight that the first and the last stage share
execute.py      Pipeline: one executor for any schedule
measure.py      the timeline and the costs of a real run, in the same form as a simulated run's; seconds of single layers
emulate.py      stages that sleep, to run a schedule on fewer cores than ranks

Also exports the names of `minipar.schedules`.
"""

import lazy_loader

import minipar.schedules
from minipar.schedules import *  # noqa: F403

_getattr, _dir, _own = lazy_loader.attach(
    __name__,
    submod_attrs={
        "execute": ["Pipeline"],
        "measure": ["measure_layers", "measured", "measured_costs"],
        "partition": ["balance", "partition"],
    },
)
__getattr__ = _getattr
__all__ = sorted([*_own, *minipar.schedules.__all__])  # noqa: PLE0605


def __dir__() -> list[str]:
    return __all__
