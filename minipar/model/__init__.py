"""The model, written for one process: the oracle every strategy is compared with, and what each of them cuts.

Reading order:

config.py       the sizes of a model
linear.py       a linear layer whose weight gradient can wait
norm.py         root-mean-square normalisation
rope.py         positions, as rotations
attention.py    grouped-query attention; its core plain and fused
mlp.py          SwiGLU
dropout.py      masks that depend on what is dropped, not on who drops it
block.py        one layer
init.py         initial weights, from the seed and a parameter's name
transformer.py  the whole model, a stage of it, and the loss
generate.py     text from a model
"""

from minipar.model.attention import Attention, fused_attention, plain_attention
from minipar.model.block import Block
from minipar.model.config import ModelConfig
from minipar.model.dropout import dropout
from minipar.model.generate import generate
from minipar.model.init import initial_weight, initialize
from minipar.model.linear import Linear, TiedHead, WeightGradients, defer_weight_gradients, linear
from minipar.model.mlp import SwiGLU
from minipar.model.norm import RMSNorm
from minipar.model.rope import rotate, rotation
from minipar.model.transformer import IGNORED, Transformer, cross_entropy_sum

__all__ = [
    "IGNORED",
    "Attention",
    "Block",
    "Linear",
    "ModelConfig",
    "RMSNorm",
    "SwiGLU",
    "TiedHead",
    "Transformer",
    "WeightGradients",
    "cross_entropy_sum",
    "defer_weight_gradients",
    "dropout",
    "fused_attention",
    "generate",
    "initial_weight",
    "initialize",
    "linear",
    "plain_attention",
    "rotate",
    "rotation",
]
