"""Read a Hugging Face Llama's config.json as a ModelConfig; refuse what this model cannot represent. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from minipar.config.model_config import ModelConfig

# The only values that these fields of config.json may have; another value means another model.
ONLY = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
SIZES = (
    "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim", "max_seq_len", "norm_eps", "rope_theta",
    "tie_embeddings",
)  # fmt: skip


def read_config(path: Path) -> ModelConfig:
    """Read config.json of a Llama. Raises ValueError for what a ModelConfig cannot represent."""
    given = read_json(path)
    for field, only in ONLY.items():
        found = given.get(field, only)
        if (found or None) != (only or None):
            raise ValueError(
                f"{path}: {field}={found!r} is not in this model; use a Llama with {field}={only!r}"
            )
    try:
        config = ModelConfig(
            vocab_size=given["vocab_size"],
            dim=given["hidden_size"],
            num_layers=given["num_hidden_layers"],
            num_heads=given["num_attention_heads"],
            num_kv_heads=given.get("num_key_value_heads", given["num_attention_heads"]),
            hidden_dim=given["intermediate_size"],
            max_seq_len=given["max_position_embeddings"],
            norm_eps=given["rms_norm_eps"],
            rope_theta=_rope_theta(path, given),
            tie_embeddings=given.get("tie_word_embeddings", False),
        )
    except KeyError as missing:
        raise ValueError(f"{path} has no {missing}; give a whole configuration of a Llama") from None
    head_dim = given.get("head_dim") or config.head_dim
    if head_dim != config.head_dim:
        raise ValueError(
            f"{path}: head_dim={head_dim} is not hidden_size / num_attention_heads, which this model's heads have; "
            f"use head_dim={config.head_dim}"
        )
    return config


def _rope_theta(path: Path, given: dict[str, Any]) -> float:
    """Return the base of RoPE's wavelengths: from `rope_parameters` (transformers 5), else the top-level `rope_theta`."""
    rope: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        of_field = given.get(field) or {}
        kind = of_field.get("rope_type", of_field.get("type", "default"))
        changes = sorted(of_field.keys() - {"rope_type", "type", "rope_theta"})
        if kind != "default" or changes:
            raise ValueError(
                f"{path}: {field} with rope_type={kind!r} and {changes} scales the rotary embeddings, which this model "
                "does not do; use a Llama with rope_type='default' alone, as Llama 2 and Llama 3 (not 3.1) are"
            )
        rope |= of_field
    return float(rope.get("rope_theta") or given.get("rope_theta") or 10000.0)


def sizes_from(folder: Path, model: ModelConfig, defaults: tuple[ModelConfig, ...]) -> ModelConfig:
    """Return `model` with the sizes of the Llama in `folder`.

    A size counts as not given if it equals that size in one of `defaults`, or is derived from the model's other sizes.
    Raises ValueError, naming both sizes, if a given size differs from the Llama's; also for a model with experts,
    parallel blocks or latent attention.
    """
    if model.num_experts:
        raise ValueError(f"init={folder} is a Llama, and num_experts={model.num_experts}: it has none; use 0")
    if model.parallel_block:
        raise ValueError(
            f"init={folder} is a Llama, and parallel_block=True: its MLP has a norm of its own; leave it out"
        )
    if model.kv_latent_dim:
        raise ValueError(
            f"init={folder} is a Llama, and kv_latent_dim={model.kv_latent_dim}: it has no latent attention; leave it out"
        )
    theirs = read_config(Path(folder) / "config.json")
    for name in SIZES:
        given, stored = getattr(model, name), getattr(theirs, name)
        not_given = {getattr(default, name) for default in defaults}
        if name in ("num_kv_heads", "hidden_dim"):
            derived: dict[str, Any] = {name: None}
            not_given.add(getattr(replace(model, **derived), name))
        if given != stored and given not in not_given:
            raise ValueError(
                f"model.{name}={given}, but the Llama of init={folder} has {name}={stored}; use that, or leave it out"
            )
    return replace(model, **{name: getattr(theirs, name) for name in SIZES})


def read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give a folder with a Llama of Hugging Face's") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
