"""Hugging Face's Llama (1 to 3.3), Mistral, Mixtral, Qwen2, 2.5, 3 or 3-MoE: configuration, and weights by our names.

This model has their architectures, parameter for parameter, so loading only renames the weights. Checkpoints that it
cannot represent are refused: another activation, sliding windows, other biases, quantized weights. `llama_config.FAMILIES`
holds what the families differ in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from minipar.config.llama_config import FAMILIES, read_config, read_json
from minipar.config.model_config import ModelConfig
from minipar.model.transformer import Transformer
from minipar.support.errors import one_of

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.q.bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers.{}.attention.k.bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers.{}.attention.v.bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.attention.o.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.mlp_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.mlp.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.mlp.up.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.mlp.down.weight": "model.layers.{}.mlp.down_proj.weight",
}
INDEX = "model.safetensors.index.json"  # maps weights to files, where there are several
NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # in old files: rotary wavelengths, which the configuration determines


def names_of(model_type: str) -> dict[str, str]:
    """Return Hugging Face's names of a family's weights by ours; {} is a layer's number, then an expert's."""
    experts = FAMILIES[model_type].experts
    if experts is None:
        return NAMES
    ours = {
        "router.weight": experts.router,
        **{f"experts.{n}": getattr(experts, n) for n in ("gate", "up", "down")},
    }
    return NAMES | {
        f"layers.{{}}.mlp.{name}": f"model.layers.{{}}.{theirs}.weight" for name, theirs in ours.items()
    }


# Names of all families: of two weights with the same name here, such as experts', each family has its own.
THEIRS = {theirs: ours for family in FAMILIES for ours, theirs in names_of(family).items()}


def from_huggingface(folder: str | Path) -> tuple[ModelConfig, LlamaWeights]:
    """Return the configuration of the model in `folder`, and its weights under this model's parameter names.

        config, weights = from_huggingface("Llama-3.2-1B")
        model = Transformer(config, dtype=torch.bfloat16)
        model.load_state_dict(weights)

    The model is one of `llama_config.FAMILIES`. Reads config.json, and the weights' names in model.safetensors or in the
    files that the index lists. A weight is read only when it is accessed.
    Raises ValueError, naming file and field, if a file is missing or has something that this model cannot represent.
    """
    folder = Path(folder)
    config = read_config(folder / "config.json")
    return config, LlamaWeights(folder, config)


class LlamaWeights(Mapping[str, Tensor]):
    """The unsharded weights in a folder, under this model's parameter names. Each is read from its file when accessed.

    `weights[name]` reads one tensor, `weights.slice(name)[rows, columns]` a part of it.
    Raises ValueError if names or shapes are not those of a model of this configuration.
    """

    def __init__(self, folder: Path, config: ModelConfig):
        files = _open_files(folder)
        self._slices: dict[str, Any] = {}  # safetensors has no public name for their type
        for path, file in files.items():
            for theirs in file.keys():  # noqa: SIM118 (a file is not a dict)
                if theirs.endswith(NOT_WEIGHTS):
                    continue
                ours, part = canonical_name(theirs, path), file.get_slice(theirs)
                if expert := re.search(r"\.experts\.(\d+)\.", theirs):
                    self._slices.setdefault(ours, OfExperts()).experts[int(expert[1])] = part
                else:
                    self._slices[ours] = part
        if config.tie_embeddings:
            self._slices.pop("head.weight", None)  # some files repeat the embedding
        _check_shapes(folder, config, {name: tuple(s.get_shape()) for name, s in self._slices.items()})

    def slice(self, name: str) -> Any:
        """Return the weight without reading it: indexing the result reads the indexed part."""
        return self._slices[name]

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = self._slices[name][:]
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


class OfExperts:
    """A weight that each expert has, unread, from tensors of their own: indexed as one tensor [E, ...]."""

    def __init__(self) -> None:
        self.experts: dict[int, Any] = {}

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape; (0,) if an expert is missing or has another shape, which fits no model."""
        shapes = {tuple(expert.get_shape()) for expert in self.experts.values()}
        if len(shapes) != 1 or self.experts.keys() != set(range(len(self.experts))):
            return (0,)
        return (len(self.experts), *shapes.pop())

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        of_experts, *inside = index if isinstance(index, tuple) else (index,)
        numbers = range(len(self.experts))[of_experts]
        return torch.stack([self.experts[i][tuple(inside) or slice(None)] for i in numbers])


def huggingface_name(name: str, model_type: str = "llama", expert: int = 0) -> str:
    """Return Hugging Face's name of a parameter of a family, or of an expert's part of it.

    Raises ValueError for a parameter that the family does not have.
    """
    return _renamed(name, names_of(model_type), f"a {model_type.capitalize()}", expert)


def canonical_name(theirs: str, path: Path) -> str:
    """Return our name for Hugging Face's weight `theirs`. Raises ValueError for a weight that this model does not have."""
    return _renamed(theirs, THEIRS, f"the model for {path}")


def _renamed(name: str, names: dict[str, str], whose: str, *more: int) -> str:
    numbers = re.findall(r"\.(\d+)\.", name)
    pattern = re.sub(r"\.\d+\.", ".{}.", name)
    if pattern not in names:
        raise ValueError(f"{name} is not a weight of {whose}; these are {', '.join(names)}")
    return names[pattern].format(*numbers, *more)


def _open_files(folder: Path) -> dict[Path, Any]:  # safe_open's methods are untyped
    names = ["model.safetensors"]
    if (folder / INDEX).exists():
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder / name} is missing; give a folder with model.safetensors, or {INDEX} and its files"
            )
    return {folder / name: safe_open(folder / name, framework="pt") for name in names}


def _check_shapes(folder: Path, config: ModelConfig, found: dict[str, tuple[int, ...]]) -> None:
    want = {name: tuple(p.shape) for name, p in Transformer(config, device="meta").named_parameters()}
    if missing := want.keys() - found.keys():
        raise ValueError(
            f"{folder} lacks {one_of(sorted(missing)[:3])}, {len(missing)} of {len(want)} weights"
        )
    if surplus := found.keys() - want.keys():
        raise ValueError(
            f"{folder} has {one_of(sorted(surplus)[:3])}, which a model of its config.json has not"
        )
    for name, shape in want.items():
        if found[name] != shape:
            raise ValueError(f"{folder}: {name} has shape {found[name]}, and by config.json {shape}")
