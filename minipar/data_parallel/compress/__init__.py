"""Cheap messages: gradients compressed, or sent more rarely. In reading order:

codecs.py              a vector as few bytes and back: sign, int8, fp8, top-k, random-k
error_feedback.py      what a codec lost is added to the next vector
plain_mean.py          what a compressor is; the mean of tensors uncompressed, in one message
all_reduce.py          the mean over ranks in two compressed phases
two_level.py           plain inside a node, compressed across
selective.py           only the layers that bear it
power_sgd.py           the mean of a matrix by two thin factors
momentum_optimizer.py  gradients stay a rank's own, and a momentum is averaged. Three such optimizers:
onebit_adam.py         1-bit Adam: momentum by signs, with a frozen variance
zero_one_adam.py       0/1 Adam: a variance that freezes by degrees, and steps that send nothing
onebit_lamb.py         1-bit LAMB: a layer's scale from the warm-up
local_sgd.py           local SGD, post-local SGD and DiLoCo: ranks train alone for H steps, then agree
"""

from minipar.data_parallel.compress.all_reduce import CompressedMean
from minipar.data_parallel.compress.codecs import CODECS, Float8, Int8, RandomK, Sign, TopK, make_codec
from minipar.data_parallel.compress.error_feedback import ErrorFeedback
from minipar.data_parallel.compress.local_sgd import DiLoCo
from minipar.data_parallel.compress.momentum_optimizer import MomentumOptimizer
from minipar.data_parallel.compress.onebit_adam import OneBitAdam
from minipar.data_parallel.compress.onebit_lamb import OneBitLamb
from minipar.data_parallel.compress.plain_mean import Compressors, OwnGradients, PlainMean
from minipar.data_parallel.compress.power_sgd import PowerSGD
from minipar.data_parallel.compress.selective import Selective
from minipar.data_parallel.compress.two_level import TwoLevelMean
from minipar.data_parallel.compress.zero_one_adam import ZeroOneAdam

__all__ = [
    "CODECS",
    "CompressedMean",
    "Compressors",
    "DiLoCo",
    "ErrorFeedback",
    "Float8",
    "Int8",
    "MomentumOptimizer",
    "OneBitAdam",
    "OneBitLamb",
    "OwnGradients",
    "PlainMean",
    "PowerSGD",
    "RandomK",
    "Selective",
    "Sign",
    "TopK",
    "TwoLevelMean",
    "ZeroOneAdam",
    "make_codec",
]
