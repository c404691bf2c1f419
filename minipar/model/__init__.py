"""The model, written for one process: the reference that every strategy is compared with, and what each strategy shards.

In reading order:

model_config.py       the sizes and switches of a model
overrides.py          every point of the model that a parallelism strategy may override
deferrable_linear.py  a linear layer whose weight gradient can be deferred
norm.py               root-mean-square normalisation
rope.py               rotary position embeddings
mask.py               attention masks as a range of keys for each query
lse_merge.py          merging attention over parts of the keys by their log-sum-exps
flash.py              attention in tiles, without the score matrix
fused.py              the same by torch's kernels
attention.py          grouped-query attention, with a plain, a fused or a flash core
mlp.py                SwiGLU
value_check.py        a check of values for which no GPU is waited
moe_config.py         the options of a mixture of experts
counter_dropout.py    dropout and random numbers that depend on global coordinates, not on ranks
router.py             which tokens go to which experts
groups.py             routing groups: consecutive tokens that share the experts' capacity
permute.py            permuting tokens into their experts' rows, and combining the results
grouped_kernel.py     an MLP per expert, by torch's grouped product
grouped_mlp.py        an MLP per expert, in a loop over experts, or by that
aux_loss.py           losses that balance the experts' load, and routing metrics
init.py               initial weights from the seed and a parameter's name
moe.py                a mixture of experts
block.py              one layer
fp8_linear.py         a linear layer that multiplies numbers of 8 bits, emulated
stochastic_rounding.py  rounding to bfloat16 at random, right on average
vocabulary.py         the check that tokens are in the vocabulary
transformer.py        the whole model, a stage of it, and the loss
cache.py              the key/value cache
sampling.py           text generation
llama_config.py       the config.json of a Llama of Hugging Face's, as a ModelConfig
huggingface.py        Hugging Face's Llama, read by this model's names
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
