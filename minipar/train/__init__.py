"""Train on any mesh, and prove the run equal to one process. In reading order:

optim.py             the optimizer of a run, learning rate, gradient norm over any mesh
averaging.py         how a rank averages gradients: plainly, or as an extra does
recompute.py         activation checkpointing; activations partitioned over tp or offloaded to the CPU
master_weights.py    float32 master weights of a half precision model
parallelize.py       the transformations that make a rank's part of the model, in their order
metrics.py           metrics of a step besides its loss: throughput, and the routing of the experts
step.py              one training step on one rank
reference.py         the same steps in one process, and the largest differences
log.py               writes the metrics after every step
state.py             saves the state of a run to a checkpoint, and restores it
run_files.py         the files that ranks write together: checkpoints, and parameters to compare
resume.py            refuses the checkpoints of another run, and reports changed settings
node_warning.py      a warning if tp's messages cross nodes
planned.py           converts a run's configuration to the planner's job and layout
trainer.py           the loop, and the run around it
text_generation.py   text from a trained model, on any mesh of tp and pp ranks

In rooms of their own: data, the batch of a step; checkpoint, weights and states in files; verification, the comparison of
any mesh with one process, for our model and for a model and a step of the caller's own.
"""

import lazy_loader

from minipar.config.train_config import TrainConfig as TrainConfig

__getattr__, _, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_names, "TrainConfig"])  # noqa: PLE0605


def __dir__() -> list[str]:
    return __all__
