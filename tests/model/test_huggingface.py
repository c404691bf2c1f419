"""Llamas as Hugging Face writes them: read whole, by the part, from several files; refused where they are another model."""

import json

import pytest
import torch
from safetensors.torch import save_file

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer, from_huggingface
from minipar.model.huggingface import INDEX, huggingface_name, read_config
from minipar.train.checkpoint.export import llama_config

CONFIG = ModelConfig(
    vocab_size=24, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=24, max_seq_len=32
)
SAID = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "head_dim": 4,
}


LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def write(folder, config=CONFIG, said=SAID, files: int = 1, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Write a Llama; return its weights by our names."""
    weights = {name: p.detach() for name, p in Transformer(config, seed=3).named_parameters()}
    stored = {huggingface_name(name): w.clone() for name, w in weights.items()} | more
    (folder / "config.json").write_text(json.dumps(said))
    if files == 1:
        save_file(stored, folder / "model.safetensors")
        return weights
    place = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(stored)}
    for file in set(place.values()):
        save_file({name: w for name, w in stored.items() if place[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return weights


def test_the_example_of_the_docstring_is_a_model_that_is_read(tmp_path):
    published = dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
        eos_token_id=128001, head_dim=64, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
        intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False, model_type="llama", num_attention_heads=32,
        num_hidden_layers=16, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=LLAMA3,
        rope_theta=500000.0, tie_word_embeddings=True, torch_dtype="bfloat16", use_cache=True, vocab_size=128256,
    )  # fmt: skip
    assert '"Llama-3.2-1B"' in from_huggingface.__doc__
    (tmp_path / "config.json").write_text(json.dumps(published))
    shapes = Transformer(read_config(tmp_path / "config.json"), device="meta")
    assert sum(p.numel() for p in shapes.parameters()) == 1_235_814_400


@pytest.mark.parametrize("files", [1, 3])
def test_weights_are_those_written_from_one_file_or_several(tmp_path, files):
    want = write(tmp_path, files=files, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    config, weights = from_huggingface(tmp_path)
    assert config == ModelConfig(**{**vars(CONFIG), "rope_theta": 500000.0})
    assert weights.keys() == want.keys()
    assert all(torch.equal(weights[name], want[name]) for name in want)
    part = weights.slice("layers.1.attention.q.weight")[4:8, 1:3]
    assert torch.equal(part, want["layers.1.attention.q.weight"][4:8, 1:3])
    model = Transformer(config)
    model.load_state_dict(weights)
    assert torch.equal(model.head.weight, want["head.weight"])


@pytest.mark.parametrize("repeated", [False, True])
def test_a_tied_head_is_the_embedding_even_if_a_file_repeats_it(tmp_path, repeated):
    tied = ModelConfig(**{**vars(CONFIG), "tie_embeddings": True})
    more = {"lm_head.weight": torch.zeros(24, 16)} if repeated else {}
    write(tmp_path, tied, SAID | {"tie_word_embeddings": True}, **more)
    config, weights = from_huggingface(tmp_path)
    assert config.tie_embeddings
    assert "head.weight" not in weights


@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rope_theta": 10000.0},
        {"rope_scaling": {"type": "default"}, "rope_theta": 500000.0},
    ],
)
def test_the_wavelengths_are_read_wherever_they_are_said(tmp_path, said):
    write(tmp_path, said={k: v for k, v in SAID.items() if not k.startswith("rope")} | said)
    assert from_huggingface(tmp_path)[0].rope_theta == 500000.0


LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


@pytest.mark.parametrize(
    ("said", "scaling"),
    [
        ({"rope_scaling": LLAMA3}, (8.0, 1.0, 4.0, 8192.0)),
        (
            {"rope_scaling": None, "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
            (8.0, 1.0, 4.0, 8192.0),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, (2.0,)),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 32}, None),
    ],
)
def test_llama_3_and_mistral_are_read(tmp_path, said, scaling):
    write(tmp_path, said=SAID | said)
    config, _ = from_huggingface(tmp_path)
    assert config.rope_scaling == scaling
    assert config.rope_theta == 500000.0


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ({"model_type": "llama", "head_dim": 6}, dict(head_dim=6)),
        ({"model_type": "mistral", "head_dim": 6, "sliding_window": None}, dict(head_dim=6)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, dict(qkv_bias=True)),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}, dict(qkv_bias=True)),
        ({"model_type": "qwen3", "head_dim": 6}, dict(qk_norm=True, head_dim=6)),
    ],
    ids=str,
)
def test_a_familys_switches_weights_and_head_size_are_read(tmp_path, said, changes):
    config = ModelConfig(**{**vars(CONFIG), "rope_theta": 500000.0, **changes})
    want = write(tmp_path, config, SAID | said)
    found, weights = from_huggingface(tmp_path)
    assert found == config
    assert weights.keys() == want.keys()
    assert all(torch.equal(weights[name], want[name]) for name in want)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(rope_scaling=(2.0,)),
        dict(rope_scaling=(8.0, 1.0, 4.0, 8192.0)),
        dict(head_dim=6),
        dict(qkv_bias=True, tie_embeddings=True),
        dict(qk_norm=True, head_dim=6),
    ],
    ids=str,
)
def test_an_exported_configuration_is_read_as_it_was(tmp_path, changes):
    config = ModelConfig(**{**vars(CONFIG), **changes})
    (tmp_path / "config.json").write_text(json.dumps(llama_config(config)))
    assert read_config(tmp_path / "config.json") == config


def test_wavelengths_that_are_not_said_are_those_of_the_first_llama(tmp_path):
    write(tmp_path, said={k: v for k, v in SAID.items() if not k.startswith("rope")})
    assert from_huggingface(tmp_path)[0].rope_theta == 10000.0


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (
            {"model_type": "gemma"},
            "model_type='gemma' is not in this model.*model_type=llama, mistral, qwen2, qwen3, mixtral or qwen3_moe",
        ),
        (
            {"model_type": "mistral", "sliding_window": 16},
            "sliding_window=16 is shorter than max_position_embeddings=32",
        ),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window=4096 is shorter than"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16},
            "sliding_window=16 is shorter than max_position_embeddings=32.*use a qwen2 without a window",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen2"}, r"lacks layers\.0\.attention\.k\.bias"),
        ({"model_type": "qwen3"}, r"lacks layers\.0\.attention\.k_norm\.weight"),
        ({"model_type": "mixtral", "sliding_window": None}, "has no 'num_experts'"),
        (
            {
                "model_type": "mixtral",
                "sliding_window": None,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
            },
            "num_experts_per_tok=1 weighs an expert's output by 1",
        ),
        (
            {
                "model_type": "mixtral",
                "sliding_window": None,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
            r"lacks layers\.0\.mlp\.experts\.down",
        ),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 1},
            "norm_topk_prob=None .*use one with norm_topk_prob=True",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not in this model.*hidden_act='silu'"),
        ({"head_dim": 8}, r"q\.weight has shape \(16, 16\), and by config.json \(32, 16\)"),
        ({"head_dim": 3}, "head_dim=3 is odd"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0}},
            "rope_parameters with rope_type='llama3', without low_freq_factor, high_freq_factor or original_max",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_type='yarn'.*use one of rope_type=default, linear or llama3",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"num_hidden_layers": 3}, r"lacks layers\.2\..*9 of 30 weights"),
        ({"num_hidden_layers": 1}, "which a model of its config.json has not"),
        ({"intermediate_size": 32}, r"has shape \(24, 16\), and by config.json \(32, 16\)"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None},
            "num_heads=3 does not divide dim=16",
        ),
    ],
)
def test_another_model_is_refused_with_what_would_work(tmp_path, said, says):
    write(tmp_path, said=SAID | said)
    with pytest.raises(ValueError, match=says):
        from_huggingface(tmp_path)


def test_a_missing_expert_is_no_expert_of_another_number(tmp_path):
    config = ModelConfig(
        **{**vars(CONFIG), "num_experts": 2, "top_k": 2, "capacity_factor": None, "moe_every": 1}
    )
    stored = {}
    for name, p in Transformer(config).named_parameters():
        parts = (
            {huggingface_name(name, "mixtral", i): x for i, x in zip((0, 2), p)}
            if ".experts." in name
            else {}
        )
        stored |= parts or {huggingface_name(name, "mixtral"): p}
    save_file({name: w.detach().clone() for name, w in stored.items()}, tmp_path / "model.safetensors")
    of_mixtral = {
        "model_type": "mixtral",
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(SAID | of_mixtral))
    with pytest.raises(ValueError, match=r"experts\.gate has shape \(0,\), and by config.json \(2, 24, 16\)"):
        from_huggingface(tmp_path)


def test_missing_files_fields_and_foreign_weights_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is missing; give a folder"):
        from_huggingface(tmp_path)
    write(tmp_path, said={k: v for k, v in SAID.items() if k != "hidden_size"})
    with pytest.raises(ValueError, match=r"config\.json has no 'hidden_size'"):
        from_huggingface(tmp_path)
    write(tmp_path, **{"model.layers.0.self_attn.o_proj.bias": torch.zeros(16)})
    with pytest.raises(ValueError, match=r"o_proj\.bias is not a weight of the model for "):
        from_huggingface(tmp_path)
    write(tmp_path, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)})
    with pytest.raises(
        ValueError, match=r"has layers\.0\.attention\.q\.bias, which a model of its config\.json has not"
    ):
        from_huggingface(tmp_path)
    with pytest.raises(ValueError, match=r"experts\.gate is not a weight of a Llama"):
        huggingface_name("layers.0.mlp.experts.gate")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        from_huggingface(tmp_path)
