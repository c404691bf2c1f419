"""Tensor parallelism: every weight matrix of a layer is sharded over ranks that compute the layer together.

In reading order:

shards.py           this rank's shard of a parameter, with its placement
sequence.py         sequence parallelism: activations sharded by tokens outside the split matrices
column.py           column-parallel products of one input and several weights: dx is summed while weight gradients compute
chunked.py          sequence parallelism's communication in chunks, overlapped with the matrix products
parallel_linear.py  column-parallel and row-parallel linear layers
vocab.py            embedding and cross-entropy with the vocabulary split over ranks
split_experts.py    MoE layers, each expert split by its hidden features
plan_checks.py      checks of a plan in its first call and backward
by_plan.py          any model, split by a plan that names its modules
before_split.py     what `tensor_parallel` refuses before it changes anything
split_model.py      `tensor_parallel`: shards every layer of the model
gather_shards.py    full state dict from the shards
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
