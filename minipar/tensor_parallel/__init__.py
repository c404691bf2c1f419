"""Tensor parallelism: every matrix of a layer cut over ranks that compute one layer together.

Reading order:

sequence.py   activations split by tokens where the matrices are not: sequence parallelism
column.py     one input, several split matrices: its gradient is summed while theirs are computed
chunked.py    sequence parallelism's communication in pieces, behind the products
linear.py     the two ways to cut a linear layer, column and row
vocab.py      the embedding and the loss, with the vocabulary cut
experts.py    a mixture of experts, each of them cut
apply.py      the recipe: how each layer of the model is cut
shards.py     a rank's part of a parameter
state.py      the whole model back from the shards
memory.py     what a layer keeps for its backward
grid.py       linear layers on a grid of ranks: 2D and 2.5D
cube.py       a linear layer on a cube of ranks: 3D
layouts.py    what a layer costs in each of these
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
