"""Tensor parallelism: every matrix of a layer cut over ranks that compute one layer together.

Reading order:

sequence.py   activations split by tokens where the matrices are not: sequence parallelism
linear.py     the two ways to cut a matrix, column and row
vocab.py      the embedding and the loss, with the vocabulary cut
apply.py      the recipe: how each layer of the model is cut
state.py      the whole model back from the shards
memory.py     what a layer keeps for its backward
"""

from minipar.tensor_parallel.apply import check_tensor_parallel, legal_sizes, tensor_parallel
from minipar.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from minipar.tensor_parallel.memory import layer_activation_bytes
from minipar.tensor_parallel.state import full_state_dict
from minipar.tensor_parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "check_tensor_parallel",
    "column_parallel",
    "full_state_dict",
    "layer_activation_bytes",
    "legal_sizes",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]
