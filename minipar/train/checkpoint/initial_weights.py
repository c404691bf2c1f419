"""The weights that a run starts from, made from the seed or read from Hugging Face's Llama; each rank gets only its own.

A model is built on the meta device, cut by every strategy, and only then given values, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from minipar.config.train_config import TrainConfig
from minipar.mesh import Placement, place_whole, placement_of
from minipar.model import Transformer
from minipar.model.huggingface import LlamaWeights, from_huggingface
from minipar.model.init import initial_weight, materialise

InitialValues = Callable[[Placement], Tensor]


def initial_values(config: TrainConfig) -> InitialValues:
    """Return a function from a part of a parameter to its value, on the CPU, in the dtype of the one-process model.

    From a seed, the function makes the whole parameter and cuts the part out; from a Llama, it reads only the part.
    """
    whole_on_meta = Transformer(config.model, device="meta", dtype=config.torch_dtype)
    # Not one dtype for all: a router's weight is float32 or wider.
    dtypes = {name: param.dtype for name, param in whole_on_meta.named_parameters()}
    weights = None if config.init is None else _weights(config.init)

    def value(placement: Placement) -> Tensor:
        name = placement.tied_to or placement.name
        if weights is not None:
            return _read(weights, placement).to(dtypes[name])
        whole = initial_weight(name, placement.global_shape, config.model, config.seed)
        return placement.slice_of(whole).to(dtypes[name])

    return value


def check_initial_weights(config: TrainConfig) -> None:
    """Raise ValueError if `config.init` lacks a weight of the model, or has one of another name or shape."""
    if config.init is not None:
        _weights(config.init)


def _weights(folder: Path) -> LlamaWeights:
    return from_huggingface(folder)[1]


def _read(weights: LlamaWeights, placement: Placement) -> Tensor:
    stored = weights.slice(placement.tied_to or placement.name)
    parts: list[Tensor] = [
        stored[tuple(slice(s, s + n) for s, n in zip(*piece.box))] for piece in placement.pieces()
    ]
    if placement.flat is None and parts:
        return parts[0]
    return torch.cat([torch.empty(0), *(part.reshape(-1) for part in parts)]).view(placement.local_shape)


@torch.no_grad()
def fill(module: nn.Module, values: InitialValues, device: torch.device | None = None) -> None:
    """Give every parameter of a module on the meta device the value for its placement, one parameter at a time.

    Needs memory for the module's own parameters and one whole parameter.
    """
    for param in list(module.parameters()):
        value = torch.empty(param.shape, dtype=param.dtype, device=device)
        materialise(param, value.copy_(values(placement_of(param))))


def fill_buffers(module: nn.Module, device: torch.device | None = None) -> None:
    """Set the buffers of a module on the meta device to zeros, which is how the biases that balance experts begin."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def whole_model(config: TrainConfig, dtype: torch.dtype | None = None, products: bool = True) -> Transformer:
    """Return the one-process model with the run's initial weights, the reference for every mesh.

    dtype     None: the run's
    products  whether its layers multiply as `--products` says; False: as they are
    """
    model = Transformer(config.model, config.seed, dtype=dtype or config.torch_dtype)
    if config.init is not None:
        placed = Transformer(config.model, device="meta")
        place_whole(placed)
        values = initial_values(config)
        with torch.no_grad():
            for param, of in zip(model.parameters(), placed.parameters()):
                param.copy_(values(placement_of(of)))
    if products:
        config.choice("products").load()(model, config, None)
    return model
