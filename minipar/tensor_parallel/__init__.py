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

from minipar.tensor_parallel.apply import check_tensor_parallel, legal_sizes, tensor_parallel
from minipar.tensor_parallel.chunked import gather_matmul, matmul_scatter
from minipar.tensor_parallel.column import Matrix, column_parallel
from minipar.tensor_parallel.cube import CubeLinear
from minipar.tensor_parallel.grid import SummaLinear
from minipar.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from minipar.tensor_parallel.memory import layer_activation_bytes
from minipar.tensor_parallel.state import full_state_dict
from minipar.tensor_parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "CubeLinear",
    "Matrix",
    "RowParallelLinear",
    "SummaLinear",
    "VocabParallelEmbedding",
    "check_tensor_parallel",
    "column_parallel",
    "full_state_dict",
    "gather_matmul",
    "layer_activation_bytes",
    "legal_sizes",
    "matmul_scatter",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]
