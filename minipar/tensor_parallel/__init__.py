"""Tensor parallelism: every weight matrix of a layer is sharded over ranks that compute the layer together.

In reading order:

shards.py           this rank's shard of a parameter, with its placement
sequence.py         sequence parallelism: activations sharded by tokens outside the split matrices
column.py           column-parallel products of one input and several weights; the sum of dx overlaps the weight gradients
chunked.py          sequence parallelism's communication in chunks, overlapped with the matrix products
parallel_linear.py  column-parallel and row-parallel linear layers
vocab.py            embedding and cross-entropy with the vocabulary split over ranks
split_experts.py    mixture of experts, each expert split by its hidden features
limits.py           tp sizes, and grids of ranks, that a model's dimensions allow
split_model.py      `tensor_parallel`: shards every layer of the model
gather_shards.py    full state dict from the shards
activation_memory.py           activation memory of a layer
grid.py             linear layers on a grid of ranks: 2D and 2.5D
cube.py             a linear layer on a cube of ranks: 3D
linear_costs.py     communication and memory of a linear layer in 1D, 2D, 2.5D and 3D
grid_layout.py      the blocks of activations that a rank of a grid or a cube holds
grid_model.py       `grid_parallel`: the whole model on a grid or a cube
grid_costs.py       communication of a step of it
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
