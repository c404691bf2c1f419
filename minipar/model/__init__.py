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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
