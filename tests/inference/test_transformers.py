"""transformers writes what our engine writes, from the Llama that we export: one after another, and batched as it comes."""

import pytest
import torch

import minipar
from benchmarks import transformers_serving as peer
from minipar.config.model_config import ModelConfig
from minipar.model import Transformer

pytest.importorskip("transformers", reason="the comparison needs transformers: pip install 'minipar[peers]'")

CONFIG = ModelConfig(vocab_size=64, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, max_seq_len=256)
TIE = 1e-5  # float32, and theirs computes norms in float32 at any dtype


def first_gap(model: Transformer, prompt, ours: list[int], theirs: list[int]) -> float:
    """The difference of the two logits at the first token where the texts differ, beside their size; 0 if they do not."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if at is None:
        return 0.0
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ours[:at]]]))[0, -1]
    return float((logits[ours[at]] - logits[theirs[at]]).abs() / logits.abs().max())


OF_FAMILY = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": dict(qkv_bias=True),
    "Qwen3ForCausalLM": dict(qk_norm=True, head_dim=16),
}


@pytest.mark.parametrize("number", [3, pytest.param(20, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", OF_FAMILY)
def test_each_familys_greedy_texts_are_theirs(tmp_path, family, number):
    """From the folder that we export: with biases and norms far from their initial values."""
    model = peer.random_llama(ModelConfig(**{**vars(CONFIG), **OF_FAMILY[family]}), torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += torch.linspace(-0.5, 0.5, len(p))
    minipar.run(peer.export, model, tmp_path, world_size=1)
    theirs = peer.load(tmp_path, "sdpa", torch.float64)
    assert type(theirs).__name__ == family
    several = peer.requests(number, CONFIG.vocab_size)
    texts = zip(several, peer.served(model, several), peer.generated(theirs, several))
    assert max(first_gap(model, request.prompt, a, b) for request, a, b in texts) < TIE


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("core", ["plain", "fused"])
def test_transformers_writes_the_same_texts(tmp_path, core, dtype):
    model = peer.random_llama(ModelConfig(**{**vars(CONFIG), "attention": core}), dtype)
    minipar.run(peer.export, model, tmp_path, world_size=1)
    theirs = peer.load(tmp_path, peer.KERNELS[core], dtype)
    several = peer.requests(6, CONFIG.vocab_size)
    ours = peer.served(model, several)
    for name, texts in (
        ("generate", peer.generated(theirs, several)),
        ("generate_batch", peer.generated_together(theirs, several)),
    ):
        assert [len(text) for text in texts] == [peer.NEW_TOKENS] * len(several)
        gaps = [first_gap(model, r.prompt, a, b) for r, a, b in zip(several, ours, texts)]
        print(f"{name} {dtype}: {sum(a == b for a, b in zip(ours, texts))} of {len(ours)} texts are equal")
        assert max(gaps) < TIE, name
    assert len({tuple(text) for text in ours}) == len(ours)  # texts of their own, not one loop


def test_weights_in_other_places_are_seen(tmp_path):
    """The check above sees two heads exchanged in one layer of the export."""
    model = peer.random_llama(CONFIG)
    minipar.run(peer.export, model, tmp_path, world_size=1)
    theirs = peer.load(tmp_path, "sdpa", torch.float32)
    q = theirs.model.layers[1].self_attn.q_proj.weight
    q.data = q.data.roll(CONFIG.head_dim, 0)
    several = peer.requests(6, CONFIG.vocab_size)
    texts = zip(several, peer.served(model, several), peer.generated(theirs, several))
    assert max(first_gap(model, request.prompt, a, b) for request, a, b in texts) > 100 * TIE
