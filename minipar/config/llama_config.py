"""Read the config.json of Hugging Face's Llama, Mistral or Qwen; refuse what this model cannot represent. Imports no torch.

FAMILIES is the table of what is read and written: a family whose models this one can represent is a row of it, and a line
of `model.huggingface.NAMES` for each weight that no other family has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from minipar.config.model_config import ModelConfig
from minipar.support.errors import one_of


class ExpertNames(NamedTuple):
    """The field of config.json with the experts' width, and the names of a layer's weights; {} is an expert's number."""

    width: str
    router: str
    gate: str
    up: str
    down: str


class Family(NamedTuple):
    """The class that transformers has for a `model_type`, and what its models have that a Llama has not.

    switches  the switches of ModelConfig that they have, each True
    window    the field that turns the sliding window on, which must then hide nothing; "": they have no window
    experts   None, or the names of the experts that each layer has: a token uses its best ones, and none is dropped
    only      fields of their config.json, besides ONLY, with the only value that this model represents
    """

    architecture: str
    switches: tuple[str, ...] = ()
    window: str = ""
    experts: ExpertNames | None = None
    only: Mapping[str, Any] = MappingProxyType({})


OF_MIXTRAL, OF_QWEN = "block_sparse_moe.experts.{}.", "mlp.experts.{}."
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", window="sliding_window"),
    "qwen2": Family("Qwen2ForCausalLM", ("qkv_bias",), window="use_sliding_window"),
    "qwen3": Family("Qwen3ForCausalLM", ("qk_norm",), window="use_sliding_window"),
    "mixtral": Family(
        "MixtralForCausalLM",
        window="sliding_window",
        experts=ExpertNames(
            "intermediate_size",
            "block_sparse_moe.gate",
            OF_MIXTRAL + "w1",
            OF_MIXTRAL + "w3",
            OF_MIXTRAL + "w2",
        ),
        only={"router_jitter_noise": 0.0},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        ("qk_norm",),
        window="use_sliding_window",
        experts=ExpertNames(
            "moe_intermediate_size",
            "mlp.gate",
            OF_QWEN + "gate_proj",
            OF_QWEN + "up_proj",
            OF_QWEN + "down_proj",
        ),
        only={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}
SWITCHES = sorted({name for family in FAMILIES.values() for name in family.switches})
DEFAULT_WINDOW = 4096  # transformers' own, where config.json does not say `sliding_window`
NUMBERS = ("num_experts", "num_local_experts")  # in either, a config.json says how many experts there are
# How this model's experts are those of a family: each layer has them, and none of their tokens is dropped.
ALL_EXPERTS: dict[str, Any] = {"capacity_factor": None, "moe_every": 1}
# The only values that these fields of config.json may have; another value means another model.
ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
# What a kind of `rope_scaling` says, in the order of ModelConfig's.
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
SIZES = (
    "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim", "max_seq_len", "norm_eps", "rope_theta",
    "rope_scaling", "tie_embeddings", "head_dim", *SWITCHES,
)  # fmt: skip


def read_config(path: Path) -> ModelConfig:
    """Read config.json of a model of FAMILIES. Raises ValueError for what a ModelConfig cannot represent."""
    given = read_json(path)
    name = given.get("model_type", "llama")
    if name not in FAMILIES:
        raise ValueError(
            f"{path}: model_type={name!r} is not in this model; use one with model_type={one_of(FAMILIES, near=name)}"
        )
    family = FAMILIES[name]
    for field, only in {**ONLY, **family.only}.items():
        found = given.get(field, ONLY.get(field))
        if (found or None) != (only or None):
            raise ValueError(f"{path}: {field}={found!r} is not in this model; use one with {field}={only!r}")
    theta, scaling = _rope(path, given)
    try:
        sizes: dict[str, Any] = dict(
            vocab_size=given["vocab_size"],
            dim=given["hidden_size"],
            num_layers=given["num_hidden_layers"],
            num_heads=given["num_attention_heads"],
            num_kv_heads=given.get("num_key_value_heads"),
            head_dim=given.get("head_dim"),
            hidden_dim=given[family.experts.width if family.experts else "intermediate_size"],
            max_seq_len=given["max_position_embeddings"],
            norm_eps=given["rms_norm_eps"],
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=given.get("tie_word_embeddings", False),
            **dict.fromkeys(family.switches, True),
        )
        if family.experts:
            sizes |= ALL_EXPERTS | {
                "num_experts": given[next((n for n in NUMBERS if n in given), NUMBERS[0])],
                "top_k": given["num_experts_per_tok"],
            }
    except KeyError as missing:
        raise ValueError(f"{path} has no {missing}; give a whole configuration of a {name}") from None
    config = ModelConfig(**sizes)
    if config.num_experts and config.top_k == 1:
        raise ValueError(
            f"{path}: num_experts_per_tok=1 weighs an expert's output by 1, and this model by its probability; use a model "
            "with 2 or more"
        )
    window = given.get("sliding_window", DEFAULT_WINDOW)
    has_window = given.get(family.window, family.window == "sliding_window") and window is not None
    if has_window and window < config.max_seq_len:
        raise ValueError(
            f"{path}: sliding_window={window} is shorter than max_position_embeddings={config.max_seq_len}, and this model "
            f"attends to all tokens; use a {name} without a window, or set max_position_embeddings to {window} there"
        )
    return config


def _rope(path: Path, given: dict[str, Any]) -> tuple[float, tuple[float, ...] | None]:
    """Return RoPE's base and scaling: from `rope_parameters` (transformers 5), else from the fields of before."""
    rope: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        of_field = given.get(field) or {}
        kind = of_field.get("rope_type", of_field.get("type", "default"))
        takes = SCALINGS.get(kind, ())
        unknown = sorted(of_field.keys() - {"rope_type", "type", "rope_theta", *takes})
        missing = [name for name in takes if not isinstance(of_field.get(name), int | float)]
        if kind not in SCALINGS or unknown or missing:
            lacks = f", without {one_of(missing)}" if missing else f" and {unknown}" if unknown else ""
            raise ValueError(
                f"{path}: {field} with rope_type={kind!r}{lacks} is not in this model; use one of "
                f"rope_type={one_of(SCALINGS)}"
            )
        rope |= of_field | {"scaling": tuple(float(of_field[name]) for name in takes) or rope.get("scaling")}
    return float(rope.get("rope_theta") or given.get("rope_theta") or 10000.0), rope["scaling"]


def sizes_from(folder: Path, model: ModelConfig, defaults: tuple[ModelConfig, ...]) -> ModelConfig:
    """Return `model` with the sizes of the Llama in `folder`.

    A size counts as not given if it equals that size in one of `defaults`, or is derived from the model's other sizes.
    Raises ValueError, naming both sizes, if a given size differs from the Llama's; also for a model with experts,
    parallel blocks or latent attention.
    """
    if model.parallel_block:
        raise ValueError(
            f"init={folder} is a Llama, and parallel_block=True: its MLP has a norm of its own; leave it out"
        )
    if model.kv_latent_dim:
        raise ValueError(
            f"init={folder} is a Llama, and kv_latent_dim={model.kv_latent_dim}: it has no latent attention; leave it out"
        )
    theirs = read_config(Path(folder) / "config.json")
    if model.num_experts and not theirs.num_experts:
        raise ValueError(f"init={folder} is a Llama, and num_experts={model.num_experts}: it has none; use 0")
    sizes = (*SIZES, "num_experts", "top_k", *ALL_EXPERTS) if theirs.num_experts else SIZES
    for name in sizes:
        given, stored = getattr(model, name), getattr(theirs, name)
        if given == stored:
            continue
        not_given = {getattr(default, name) for default in defaults}
        if name in ("num_kv_heads", "hidden_dim", "head_dim"):
            derived: dict[str, Any] = {name: None}
            not_given.add(getattr(replace(model, **derived), name))
        if given not in not_given:
            raise ValueError(
                f"model.{name}={given}, but the Llama of init={folder} has {name}={stored}; use that, or leave it out"
            )
    return replace(model, **{name: getattr(theirs, name) for name in sizes})


def read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give a folder with a Llama of Hugging Face's") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
