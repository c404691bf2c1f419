"""The main job: train a byte-level model on text, and prove the run equal to one process. In reading order:

config.py      what a run is, checked before anything starts
text.py        the text, and the batch of step k as a function of (seed, k)
optim.py       optimizer, learning rate, gradient norm over any mesh
parallelize.py the recipe: which transformation is applied in which order
trainer.py     the loop, on every rank
reference.py   the same steps in one process, and the largest differences
record.py      what a run leaves behind: metrics, weights, a trace
"""

from minipar.train.config import TrainConfig
from minipar.train.optim import clip_grad_norm_
from minipar.train.trainer import train

__all__ = ["TrainConfig", "clip_grad_norm_", "train"]
