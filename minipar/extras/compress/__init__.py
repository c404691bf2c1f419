"""Compressed gradients, and gradients or weights that are averaged less often. In reading order:

codecs.py              encode a vector in few bytes and decode it: sign, int8, fp8, top-k
plain_mean.py          the interface of a compressor, and the uncompressed mean, in one message
compressed_buckets.py  compressors in place of the reductions of DDP, ZeroOptimizer and FSDP
compressed_mean.py     the mean over ranks, in two compressed phases
sketch.py              sums of a sparse vector's elements, from which it is recovered: to be read, in no run
selective.py           a mean that is compressed for some layers only
power_sgd.py           the mean of a matrix as a product of two thin factors
momentum_optimizer.py  the base of the next three optimizers, which average momenta instead of gradients
onebit_adam.py         1-bit Adam: sends the signs of the momentum; the variance is frozen
zero_one_adam.py       0/1 Adam: updates the variance less and less often, and sends nothing in some steps
onebit_lamb.py         1-bit LAMB: takes each layer's scale from the warm-up
one_process.py         computes the same averages in one process, for `minipar verify`
run_state.py           the compression of a run, and its state in checkpoints
lossy_reference.py     compares each step of a run with one process, for `minipar verify`
choices.py             the methods of --compress, and which configurations they refuse
diloco.py              DiLoCo: ranks train independently for H steps, then take an outer step by the mean of their ways

The way from the flag `--compress sign` to the bits:

    choices.py             SIGN is found by its entry point "compress.sign" in pyproject.toml
    run_state.py           `minipar.train.parallelize` makes `Compressed(config)`, and passes its `reduce_bucket` to DDP
    compressed_buckets.py  passes the gradients of a bucket to the compressor of its Comm
    selective.py           averages vectors uncompressed, and passes matrices on
    compressed_mean.py     averages them by an all-to-all and an all-gather of encoded vectors
    codecs.py              Sign encodes a vector in one bit per element
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "compressed_mean": ["CompressedMean"],
        "compressed_buckets": ["CompressedBuckets", "own_gradients"],
        "codecs": ["CODECS", "Float8", "Int8", "Sign", "TopK"],
        "diloco": ["DiLoCo"],
        "momentum_optimizer": ["MomentumOptimizer"],
        "onebit_adam": ["OneBitAdam"],
        "onebit_lamb": ["OneBitLamb"],
        "plain_mean": ["PlainMean"],
        "power_sgd": ["PowerSGD"],
        "selective": ["Selective"],
        "sketch": ["Sketch"],
        "zero_one_adam": ["ZeroOneAdam"],
    },
)
