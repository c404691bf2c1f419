"""A trained model as one safetensors file, under minipar's names or as Hugging Face's Llama; and back.

The model and each of its parameters are Llama's, so converting the weights only renames them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from minipar.mesh import Placement
from minipar.model import ModelConfig
from minipar.train.atomic_files import prepare_folder, write_whole
from minipar.train.restore import Checkpoint

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.o.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.mlp_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.mlp.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.mlp.up.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.mlp.down.weight": "model.layers.{}.mlp.down_proj.weight",
}


def full_parameters(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every parameter of a checkpoint, whole, under its canonical name."""
    names = sorted(checkpoint.names("parameter"))
    return {
        name: checkpoint.read("parameter", Placement.whole(name, checkpoint.global_shape("parameter", name)))
        for name in names
    }


def export_model(checkpoint: Checkpoint, path: Path) -> None:
    """Write the model as one safetensors file under canonical names, its configuration in the file's metadata."""
    metadata = {"minipar": json.dumps(checkpoint.extra.get("model", {}))}
    write_whole(path, save(full_parameters(checkpoint), metadata))


def export_llama(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config.json and model.safetensors as `LlamaForCausalLM.from_pretrained(folder)` reads them."""
    config = ModelConfig(**checkpoint.extra["model"])
    prepare_folder(folder)
    write_whole(folder / "model.safetensors", save(to_llama(full_parameters(checkpoint)), {"format": "pt"}))
    write_whole(folder / "config.json", json.dumps(llama_config(config), indent=2))


def import_llama(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read the configuration and parameters, under canonical names, from a folder with Hugging Face's Llama.

    Raises ValueError where the model has another type, attention biases or RoPE scaling.
    """
    given = json.loads((folder / "config.json").read_text())
    if given.get("model_type") != "llama" or given.get("attention_bias") or given.get("rope_scaling"):
        raise ValueError(f"{folder} holds a {given.get('model_type')} that minipar's model cannot express")
    config = ModelConfig(
        vocab_size=given["vocab_size"],
        dim=given["hidden_size"],
        num_layers=given["num_hidden_layers"],
        num_heads=given["num_attention_heads"],
        num_kv_heads=given.get("num_key_value_heads"),
        hidden_dim=given["intermediate_size"],
        max_seq_len=given["max_position_embeddings"],
        norm_eps=given["rms_norm_eps"],
        rope_theta=given.get("rope_theta", 10000.0),
        tie_embeddings=given.get("tie_word_embeddings", False),
    )
    return config, from_llama(load_file(folder / "model.safetensors"))


def llama_config(config: ModelConfig) -> dict:
    if config.num_experts:
        raise ValueError(
            f"num_experts={config.num_experts}: a Llama has no experts; export under minipar's names"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.hidden_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def to_llama(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {_renamed(name, NAMES): value for name, value in parameters.items()}


def from_llama(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    back = {theirs: ours for ours, theirs in NAMES.items()}
    return {_renamed(name, back): value for name, value in parameters.items()}


def _renamed(name: str, names: dict[str, str]) -> str:
    """The name in the other convention. Raises ValueError for one that has no counterpart."""
    layer = re.search(r"layers\.(\d+)\.", name)
    pattern = re.sub(r"layers\.\d+\.", "layers.{}.", name)
    if pattern not in names:
        raise ValueError(f"{name} has no counterpart among {', '.join(names)}")
    return names[pattern].format(layer.group(1)) if layer else names[pattern]
