"""The same numbers as Llama, Mistral and Qwen: as written out below, and as Hugging Face computes them."""

import math
import re
from dataclasses import replace

import pytest
import torch

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer, from_huggingface
from minipar.train.checkpoint.export import llama_config
from tests.strategies import assert_equal_to

SIZES = dict(vocab_size=31, dim=24, num_layers=3, num_heads=6, num_kv_heads=2, hidden_dim=40, max_seq_len=16)


def random_model(seed=0, **changes):
    """Weights far from their initial values, so that every term counts."""
    model = Transformer(ModelConfig(**{**SIZES, **changes}), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (p.dim() == 1))
    return model


def llama(w, tokens, config):
    """Llama's equations for one sequence, token by token and head by head."""

    def norm(x, name):
        return w[name] * x / torch.sqrt((x * x).mean() + config.norm_eps)

    def turned(x, t):
        half = config.head_dim // 2
        frequencies = 1 / config.rope_theta ** (torch.arange(half, dtype=torch.float32) / half)
        angle = torch.tensor(float(t)) * frequencies  # float32, as Hugging Face has it
        rotated_half = torch.cat((-x[half:], x[:half]))
        cos, sin = angle.cos().double().repeat(2), angle.sin().double().repeat(2)
        return x * cos + rotated_half * sin

    def attention(xs, name):
        d, group = config.head_dim, config.num_heads // config.num_kv_heads
        q, k, v = ([w[f"{name}.{n}.weight"] @ x + w.get(f"{name}.{n}.bias", 0) for x in xs] for n in "qkv")
        normed = norm if config.qk_norm else lambda x, name: x
        outs = []
        for t in range(len(xs)):
            heads = []
            for h in range(config.num_heads):
                mine, shared = slice(h * d, (h + 1) * d), slice(h // group * d, (h // group + 1) * d)
                query = turned(normed(q[t][mine], f"{name}.q_norm.weight"), t)
                keys = [turned(normed(k[s][shared], f"{name}.k_norm.weight"), s) for s in range(t + 1)]
                scores = torch.stack([query @ key / math.sqrt(d) for key in keys])
                heads.append(scores.softmax(0) @ torch.stack([v[s][shared] for s in range(t + 1)]))
            outs.append(w[f"{name}.o.weight"] @ torch.cat(heads))
        return outs

    def mlp(x, name):
        gate, up, down = (w[f"{name}.{n}.weight"] for n in ("gate", "up", "down"))
        return down @ ((gate @ x) * torch.sigmoid(gate @ x) * (up @ x))

    xs = [w["embedding.weight"][t] for t in tokens]
    for i in range(config.num_layers):
        mixed = attention([norm(x, f"layers.{i}.attention_norm.weight") for x in xs], f"layers.{i}.attention")
        xs = [x + m for x, m in zip(xs, mixed)]
        xs = [x + mlp(norm(x, f"layers.{i}.mlp_norm.weight"), f"layers.{i}.mlp") for x in xs]
    head = w.get("head.weight", w["embedding.weight"])
    return torch.stack([head @ norm(x, "norm.weight") for x in xs])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("attention", ["fused", "plain"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(tie_embeddings=True),
        dict(num_kv_heads=6, rope_theta=500.0),
        dict(norm_eps=0.1),
        dict(qkv_bias=True),
        dict(qk_norm=True, head_dim=10),
    ],
)
def test_logits_and_gradients_are_those_of_llamas_equations(attention, changes):
    model = random_model(attention=attention, **changes)
    tokens = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(1))
    reference = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    want = torch.stack([llama(reference, row.tolist(), model.config) for row in tokens])
    logits = model(tokens)
    assert_equal_to(logits, want, rtol=1e-12)
    dy = torch.randn(want.shape, dtype=want.dtype)
    logits.backward(dy), want.backward(dy)
    for name, p in model.named_parameters():
        assert_equal_to(p.grad, reference[name].grad, rtol=1e-11, what=name)


RENAMED = {
    r"^embedding\.": "model.embed_tokens.",
    r"^layers\.": "model.layers.",
    r"^norm\.": "model.norm.",
    r"^head\.": "lm_head.",
    r"attention\.([qkvo])\.": r"self_attn.\1_proj.",
    r"attention\.([qk])_norm\.": r"self_attn.\1_norm.",
    r"attention_norm\.": "input_layernorm.",
    r"mlp_norm\.": "post_attention_layernorm.",
    r"mlp\.(gate|up|down)\.": r"mlp.\1_proj.",
}


def renamed(name):
    for pattern, new in RENAMED.items():
        name = re.sub(pattern, new, name)
    return name


def rope_said(transformers, config):
    scaling = llama_config(config)["rope_scaling"]
    if transformers.__version__ < "5":
        return dict(rope_theta=config.rope_theta, rope_scaling=scaling)
    return dict(rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta} | (scaling or {}))


def huggingface_twin(transformers, model, **said):
    config = model.config
    said = llama_config(config) | rope_said(transformers, config) | said
    theirs = transformers.AutoConfig.for_model(said.pop("model_type"), **said)
    twin = transformers.AutoModelForCausalLM.from_config(theirs).to(next(model.parameters()).dtype)
    weights = {renamed(name): w for name, w in model.state_dict().items()}
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    return twin


SCALINGS = [None, (4.0,), (8.0, 1.0, 4.0, 16.0)]  # none, linear, Llama 3.1's


# What a family's models have that a Llama has not, and what their config.json says.
OF_FAMILY = {
    "Llama": (dict(head_dim=6), {}),
    "Mistral": (dict(head_dim=6), dict(model_type="mistral", sliding_window=16)),
    "Qwen2": (dict(qkv_bias=True), dict(max_window_layers=2)),
    "Qwen3": (dict(qk_norm=True, head_dim=6), {}),
}


@pytest.mark.parametrize("family", OF_FAMILY)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_exchange_with_hugging_face_by_renaming_alone(tied, dtype, scaling, family, monkeypatch):
    transformers = pytest.importorskip("transformers")
    changes, said = OF_FAMILY[family]

    def norm_in_float64(self, x):  # theirs goes down to float32 even for float64
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    model = random_model(tie_embeddings=tied, rope_theta=500.0, rope_scaling=scaling, **changes).to(dtype)
    twin = huggingface_twin(transformers, model, **said)
    assert type(twin).__name__ == f"{family}ForCausalLM"
    if dtype == torch.float64:
        monkeypatch.setattr(type(twin.model.norm), "forward", norm_in_float64)
    tokens = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(1))
    ours, theirs = model(tokens), twin(tokens).logits
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    print(f"{dtype} tied={tied}: max|ours - theirs| = {(ours - theirs).abs().max():.2e}")
    assert_equal_to(ours, theirs, rtol=rtol)
    ours.logsumexp(-1).sum().backward(), theirs.logsumexp(-1).sum().backward()
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in model.named_parameters():
        assert_equal_to(p.grad, gradients[renamed(name)], rtol=10 * rtol, what=name)


MIXTURES = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=40),
    "qwen3_moe": dict(
        num_experts=5, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True, head_dim=6
    ),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_those_of_hugging_face_from_their_folder(tmp_path, family, monkeypatch):
    transformers = pytest.importorskip("transformers")
    said = dict(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    theirs = transformers.AutoConfig.for_model(family, max_position_embeddings=16, **said, **MIXTURES[family])
    torch.manual_seed(0)
    twin = transformers.AutoModelForCausalLM.from_config(theirs, experts_implementation="eager").double()
    with torch.no_grad():
        for p in twin.parameters():
            p += torch.randn_like(p) * 0.2
    twin.save_pretrained(tmp_path)

    def norm_in_float64(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def routed_in_float64(self, x):
        logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        best, experts = logits.softmax(-1).topk(self.top_k)
        return logits, best / best.sum(-1, keepdim=True), experts

    monkeypatch.setattr(type(twin.model.norm), "forward", norm_in_float64)
    monkeypatch.setattr(type(twin.model.layers[0].mlp.gate), "forward", routed_in_float64)
    config, weights = from_huggingface(tmp_path)
    model = Transformer(replace(config, balance_coef=0.0, z_coef=0.0), dtype=torch.float64)
    model.load_state_dict(weights)
    tokens = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(1))
    ours, want = model(tokens), twin(tokens).logits
    assert_equal_to(ours, want, rtol=1e-11)
    ours.logsumexp(-1).sum().backward(), want.logsumexp(-1).sum().backward()
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in model.named_parameters():
        if ".experts." in name or ".router." in name:
            continue
        assert_equal_to(p.grad, gradients[renamed(name)], rtol=1e-10, what=name)
    for number, block in model.layers.items():
        mixture, of_layer = block.mlp, f"model.layers.{number}.mlp."
        assert_equal_to(mixture.router.weight.grad, gradients[of_layer + "gate.weight"], rtol=1e-10)
        gate_up = torch.cat([mixture.experts.gate.grad, mixture.experts.up.grad], dim=1)
        assert_equal_to(gate_up, gradients[of_layer + "experts.gate_up_proj"], rtol=1e-10)
        assert_equal_to(mixture.experts.down.grad, gradients[of_layer + "experts.down_proj"], rtol=1e-10)
