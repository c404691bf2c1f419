"""Train a byte-level model on text, on any mesh, and prove the run equal to one process. In reading order:

train_config.py       a run's configuration: model, batch, optimizer, mesh
check_config.py       which meshes, models and batches fit each other, checked before any rank starts
toml_config.py        a configuration as a TOML file
text.py               the text as bytes, and the batch of step k as a function of (seed, k)
optim.py              parameter groups, learning rate, gradient norm over any mesh
recompute.py          activation checkpointing; activations partitioned over tp or offloaded to the CPU
parallelize.py        the recipe: which transformation is applied in which order
metrics.py            metrics of a step besides its loss: throughput, and the routing of the experts
step.py               one training step on one rank
reference.py          the same steps in one process, and the largest differences
provenance.py         which steps of the recipe made a rank's part of a tensor
verification.py       any mesh against one process, tensor by tensor
atomic_files.py       files that are written completely or not at all
log.py                metrics, written after every step
restore.py            find the newest undamaged checkpoint, and read it on any mesh
checkpoint.py         write a sharded checkpoint while training continues
state.py              the state of a run, to a checkpoint and back
internode_traffic.py  which axes cross nodes, and the bytes that tp then sends between them
trainer.py            the loop, and the run around it
export.py             a trained model as one file, or as Hugging Face's Llama
text_generation.py    text from a trained model, on any mesh of tp and pp ranks
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
