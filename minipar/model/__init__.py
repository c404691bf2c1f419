"""The model, written for one process. Every strategy shards this model, and its results are compared with this model's.

In reading order:

overrides.py          every point of the model that a parallelism strategy may override
products.py           the three matrix products of a linear layer
autocast.py           torch.autocast for products that are autograd functions of our own
deferrable_linear.py  a linear layer whose weight gradient can be deferred
norm.py               root-mean-square normalisation
rope.py               rotary position embeddings
mask.py               attention masks as a range of keys for each query
lse_merge.py          merges attention results over separate parts of the keys by their log-sum-exps
flash.py              attention in tiles, without the score matrix
fused.py              flash attention by torch's fused kernels
attention.py          grouped-query attention, with a plain, a fused or a flash core
latent_attention.py   multi-head latent attention: keys and values computed from a narrow latent, which is what is cached
mlp.py                SwiGLU
value_check.py        an assertion about values that does not wait for a GPU
counter_dropout.py    dropout and random numbers that depend on global coordinates, not on ranks
router.py             which tokens go to which experts
groups.py             routing groups: consecutive tokens that share the experts' capacity
permute.py            permuting tokens into their experts' rows, and combining the results
grouped_kernel.py     an MLP per expert, computed by torch's grouped matrix product
grouped_mlp.py        an MLP per expert, computed in a loop over experts or by the grouped product
aux_loss.py           losses that balance the experts' load, and routing metrics
init.py               initial weights from the seed and a parameter's name
moe.py                the MoE layer
block.py              one layer
vocabulary.py         the check that tokens are in the vocabulary
transformer.py        the whole model, a stage of it, and the loss
cache.py              the KV cache
evaluating.py         evaluation mode for a while
sampling.py           text generation
huggingface.py        loading Hugging Face's Llama, Mistral or Qwen under this model's parameter names
"""

import lazy_loader

from minipar.config.model_config import ModelConfig as ModelConfig
from minipar.config.moe_config import MoEConfig as MoEConfig

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*__all__, "ModelConfig", "MoEConfig"])  # noqa: PLE0605
