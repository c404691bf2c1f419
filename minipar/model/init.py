"""Initial weights that depend on a parameter's name and the seed, never on the rank or the order of creation."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from minipar.config.model_config import ModelConfig


def initial_weight(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """Return the full initial value, float32 on the CPU, of the parameter with this canonical name.

    norm weights           1
    biases                 0
    o and down             normal, standard deviation 0.02 / sqrt(2 num_layers), because the outputs of 2 num_layers such
                           matrices add up in the residual stream (GPT-2, section 2.3)
    everything else        normal, standard deviation 0.02

    A rank that owns a shard makes the full weight and cuts its shard out. Weights of other dtypes are cast from float32.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    deviation = 0.02
    if name.endswith((".o.weight", ".down.weight", ".experts.down")):
        deviation /= math.sqrt(2 * config.num_layers)
    generator = torch.Generator().manual_seed(_seed_of_name(seed, name))
    return torch.randn(shape, generator=generator).mul_(deviation)  # in place: no second whole weight


def _seed_of_name(seed: int, name: str) -> int:
    """Return a 63-bit hash; Python's own hash() differs from process to process."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@torch.no_grad()
def initialize(module: nn.Module, config: ModelConfig, seed: int, prefix: str = "") -> None:
    """Fill the parameters of a model, of a stage, or of a submodule whose canonical names begin with `prefix`.

        for i, block in model.layers.items():
            initialize(block.to_empty(device="cpu"), config, seed, prefix=f"layers.{i}.")

    A stage's tied head starts equal to its embedding. Raises ValueError on a meta parameter.
    """
    tied = getattr(module, "tied_copies", {})
    for name, parameter in module.named_parameters():
        canonical = prefix + tied.get(name, name)
        if parameter.is_meta:
            raise ValueError(
                f"{canonical} is on the meta device and holds no numbers; use to_empty(device=...) first"
            )
        parameter.copy_(initial_weight(canonical, tuple(parameter.shape), config, seed))


def materialise(param: nn.Parameter, value: Tensor) -> None:
    """Give a parameter on the meta device a value, and keep its attributes. torch refuses to assign to its `.data`."""
    real = nn.Parameter(value, requires_grad=param.requires_grad)
    real.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, real)
    if hooks := param._post_accumulate_grad_hooks:
        param._post_accumulate_grad_hooks = hooks  # set anew, since torch has swapped away what calls them
