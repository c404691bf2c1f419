"""The model, written for one process: the oracle every strategy is compared with, and what each of them cuts.

Reading order:

config.py       the sizes of a model
linear.py       a linear layer whose weight gradient can wait
norm.py         root-mean-square normalisation
rope.py         positions, as rotations
mask.py         who sees whom, as a range of keys for each query
merge.py        attention over parts of the keys, joined by their log-sum-exps
flash.py        attention in tiles, without the matrix of scores
fused.py        the same by torch's kernels, with the log-sum-exps
attention.py    grouped-query attention; its core plain, fused and flash
mlp.py          SwiGLU
mixture.py      the options of a mixture of experts
router.py       which tokens go to which experts
groups.py       the neighbouring tokens that share the experts' room
permute.py      bringing tokens to their experts' rows, and the results back
experts.py      an MLP per expert, all in one go
balance.py      losses that keep experts evenly used, and what is reported
moe.py          a mixture of experts
dropout.py      masks that depend on what is dropped, not on who drops it
block.py        one layer
init.py         initial weights, from the seed and a parameter's name
transformer.py  the whole model, a stage of it, and the loss
cache.py        keys and values kept from token to token
generate.py     text from a model
"""

from minipar.model.attention import Attention, fused_attention, plain_attention
from minipar.model.balance import MoEMetrics
from minipar.model.block import Block
from minipar.model.config import ModelConfig
from minipar.model.dropout import dropout
from minipar.model.flash import flash_attention
from minipar.model.generate import generate
from minipar.model.init import initial_weight, initialize
from minipar.model.linear import Linear, TiedHead, WeightGradients, defer_weight_gradients, linear
from minipar.model.mixture import MixtureConfig
from minipar.model.mlp import SwiGLU
from minipar.model.moe import SwitchMoE, mixtures, set_num_groups, take_metrics, update_balance_bias
from minipar.model.norm import RMSNorm
from minipar.model.rope import rotate, rotation
from minipar.model.transformer import IGNORED, Transformer, cross_entropy_sum

__all__ = [
    "IGNORED",
    "Attention",
    "Block",
    "Linear",
    "MixtureConfig",
    "MoEMetrics",
    "ModelConfig",
    "RMSNorm",
    "SwiGLU",
    "SwitchMoE",
    "TiedHead",
    "Transformer",
    "WeightGradients",
    "cross_entropy_sum",
    "defer_weight_gradients",
    "dropout",
    "flash_attention",
    "fused_attention",
    "generate",
    "initial_weight",
    "initialize",
    "linear",
    "mixtures",
    "plain_attention",
    "rotate",
    "rotation",
    "set_num_groups",
    "take_metrics",
    "update_balance_bias",
]
