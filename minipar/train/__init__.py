"""The main job: train a byte-level model on text, and prove the run equal to one process. In reading order:

config.py      what a run is
layout.py      which meshes fit it, checked before anything starts
text.py        the text, and the batch of step k as a function of (seed, k)
optim.py       optimizer, learning rate, gradient norm over any mesh
parallelize.py the recipe: which transformation is applied in which order
recompute.py   activations computed again, cut over tp, or kept on the CPU
step.py        one step on one rank
metrics.py     what a step reports besides its loss
trainer.py     the loop, and the run around it
reference.py   the same steps in one process, and the largest differences
place.py       which steps of the recipe made a rank's part of a tensor
verify.py      any mesh against one process, tensor by tensor
record.py      files that nobody reads half written
log.py         metrics, as they come
file.py        a configuration as TOML
state.py       what of a run is state
checkpoint.py  every rank writes its parts
restore.py     any mesh reads them
export.py      one file, or Hugging Face's Llama
generate.py    text from a trained model, on any mesh
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
