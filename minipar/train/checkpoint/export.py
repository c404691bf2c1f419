"""A trained model as one safetensors file, under minipar's names or as Hugging Face's; `from_huggingface` reads it.

The model has the architecture of a Llama or, with biases or norms of queries and keys, of a Qwen, parameter for parameter,
so converting the weights only renames them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minipar.config.llama_config import ALL_EXPERTS, FAMILIES, NUMBERS, SCALINGS, SWITCHES
from minipar.config.model_config import ModelConfig
from minipar.mesh import Placement
from minipar.model.huggingface import huggingface_name
from minipar.support.atomic_files import prepare_folder, whole_file, write_whole
from minipar.support.errors import one_of
from minipar.train.checkpoint.restore import Checkpoint
from minipar.train.checkpoint.tensor_file import Streamed, write_streamed
from minipar.train.data.tokenizer import tokenizer_json

# A run has none of these. Where a file leaves them out, transformers takes tokens 1 and 2, and ends a text at 2.
NO_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# The options of experts that decide what a trained model computes, as all families have them.
AS_THEIRS = ALL_EXPERTS | {"router": "top_k", "shared_dim": 0, "balance_bias": False, "nodes_per_token": None}
TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}


def full_parameters(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return every parameter of a checkpoint, unsharded, under its canonical name."""
    names = sorted(checkpoint.names("parameter"))
    return {
        name: checkpoint.read("parameter", Placement.whole(name, checkpoint.global_shape("parameter", name)))
        for name in names
    }


def export_model(checkpoint: Checkpoint, path: Path) -> None:
    """Write the model as one safetensors file, under canonical names and with its configuration in the metadata.

    Only one of its tensors is in memory at a time. Raises ValueError if `path` is a folder.
    """
    if Path(path).is_dir():
        raise ValueError(f"out={path} is a folder; give a file, such as {Path(path) / 'model.safetensors'}")
    _write_tensors(
        checkpoint,
        path,
        lambda whole: [(whole.name, whole, whole.length)],
        {"minipar": json.dumps(checkpoint.extra.get("model", {}))},
    )


def export_llama(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config.json and model.safetensors as `AutoModelForCausalLM.from_pretrained(folder)` reads them.

    Also writes generation_config.json and, unless the run was trained on bare token ids, the files of its tokenizer, which
    then encodes text as the run did: without special tokens.
    Only one of its tensors is in memory at a time. Raises ValueError for a model that none of FAMILIES can express, and if
    the run's folder has another tokenizer than that of its checkpoint.
    """
    config = llama_config(ModelConfig(**checkpoint.extra["model"]))
    tokenizer = tokenizer_json(checkpoint.path.absolute().parents[1], checkpoint.extra)
    prepare_folder(folder)
    parts = partial(_parts, config["model_type"])
    _write_tensors(checkpoint, folder / "model.safetensors", parts, {"format": "pt"})
    files: dict[str, dict[str, Any]] = {"config.json": config, "generation_config.json": NO_SPECIAL_TOKENS}
    if tokenizer is not None:
        files |= {"tokenizer.json": tokenizer, "tokenizer_config.json": TOKENIZER_CONFIG}
    for name, content in files.items():
        write_whole(folder / name, json.dumps(content, indent=2))


Parts = Callable[[Placement], list[tuple[str, Placement, tuple[int, ...]]]]


def _parts(model_type: str, whole: Placement) -> list[tuple[str, Placement, tuple[int, ...]]]:
    """Return Hugging Face's names, parts and shapes of a parameter: one, or one for each expert."""
    if ".experts." not in whole.name:
        return [(huggingface_name(whole.name, model_type), whole, whole.length)]
    number, *shape = whole.length
    names = [huggingface_name(whole.name, model_type, i) for i in range(number)]
    return [(name, whole.shard(0, i, number), tuple(shape)) for i, name in enumerate(names)]


def _write_tensors(checkpoint: Checkpoint, path: Path, parts: Parts, metadata: dict[str, str]) -> None:
    tensors = []
    for name in sorted(checkpoint.names("parameter")):
        whole = Placement.whole(name, checkpoint.global_shape("parameter", name))
        for theirs, part, shape in parts(whole):
            read = partial(_read, checkpoint, part, shape)
            tensors.append(Streamed(theirs, checkpoint.dtype("parameter", name), shape, read))
    with whole_file(path) as file:
        write_streamed(file, tensors, metadata)


def _read(checkpoint: Checkpoint, part: Placement, shape: tuple[int, ...]) -> torch.Tensor:
    return checkpoint.read("parameter", part).view(shape)


def llama_config(config: ModelConfig) -> dict[str, Any]:
    for name, only in AS_THEIRS.items():
        if config.num_experts and getattr(config, name) != only:
            raise ValueError(
                f"{name}={getattr(config, name)}: experts of Hugging Face's families have {name}={only}; export under "
                "minipar's names"
            )
    if config.num_experts and config.top_k == 1:
        raise ValueError("top_k=1: a Mixtral weighs an only expert by 1; export under minipar's names")
    if config.parallel_block:
        raise ValueError(
            "parallel_block=True: a Llama's MLP has a norm of its own; export under minipar's names"
        )
    if config.kv_latent_dim:
        raise ValueError(
            f"kv_latent_dim={config.kv_latent_dim}: a Llama has no latent attention; export under minipar's names"
        )
    switches = [name for name in SWITCHES if getattr(config, name)]
    found_in = (set(switches), config.num_experts > 0)
    model_type = next(
        (name for name, f in FAMILIES.items() if (set(f.switches), f.experts is not None) == found_in), None
    )
    if model_type is None:
        found = " with ".join(
            [f"num_experts={config.num_experts}"] * found_in[1] + [f"{s}=True" for s in switches]
        )
        raise ValueError(f"{found} is in none of {one_of(FAMILIES)}; export under minipar's names")
    family = FAMILIES[model_type]
    of_experts: dict[str, Any] = {}
    if family.experts:
        of_experts = dict.fromkeys(NUMBERS, config.num_experts) | {family.experts.width: config.hidden_dim}
        of_experts |= {"num_experts_per_tok": config.top_k, **family.only}
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        **of_experts,
        **NO_SPECIAL_TOKENS,
    }


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    kind = "linear" if len(config.rope_scaling) == 1 else "llama3"
    said: dict[str, Any] = dict(zip(SCALINGS[kind], config.rope_scaling))
    if kind == "llama3":
        said["original_max_position_embeddings"] = int(said["original_max_position_embeddings"])
    return said | {"rope_type": kind}
