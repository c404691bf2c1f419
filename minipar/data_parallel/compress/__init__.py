"""Cheap messages: gradients compressed, or sent more rarely. In reading order:

codecs.py          a vector as few bytes and back: sign, int8, fp8, top-k, random-k
error_feedback.py  what a codec lost is added to the next vector
all_reduce.py      the mean over ranks in two compressed phases
power_sgd.py       the mean of a matrix by two thin factors
onebit_adam.py     1-bit Adam: momentum by signs, with a frozen variance
local_sgd.py       local SGD and DiLoCo: ranks train alone for H steps, then agree
"""

from minipar.data_parallel.compress.all_reduce import CompressedMean
from minipar.data_parallel.compress.codecs import CODECS, Float8, Int8, RandomK, Sign, TopK, make_codec
from minipar.data_parallel.compress.error_feedback import ErrorFeedback
from minipar.data_parallel.compress.local_sgd import DiLoCo
from minipar.data_parallel.compress.onebit_adam import OneBitAdam
from minipar.data_parallel.compress.power_sgd import PowerSGD

__all__ = [
    "CODECS",
    "CompressedMean",
    "DiLoCo",
    "ErrorFeedback",
    "Float8",
    "Int8",
    "OneBitAdam",
    "PowerSGD",
    "RandomK",
    "Sign",
    "TopK",
    "make_codec",
]
