import math

import pytest
import torch
from torch import nn

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer, initial_weight, initialize
from minipar.model.init import materialise

CONFIG = ModelConfig(vocab_size=64, dim=64, num_layers=4, num_heads=4)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_weight_depends_on_seed_and_name_and_on_nothing_else():
    def make(name, seed):
        return initial_weight(name, (8, 8), CONFIG, seed)

    state = torch.get_rng_state()
    assert torch.equal(make("layers.0.attention.q.weight", 3), make("layers.0.attention.q.weight", 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(make("layers.0.attention.q.weight", 3), make("layers.0.attention.q.weight", 4))
    assert not torch.equal(make("layers.0.attention.q.weight", 3), make("layers.1.attention.q.weight", 3))
    assert not torch.equal(make("layers.1.attention.q.weight", 1), make("layers.11.attention.q.weight", 1))


def test_the_numbers_are_the_same_in_every_process_and_release():
    got = initial_weight("layers.0.attention.q.weight", (2, 2), CONFIG, 0).flatten().tolist()
    assert got == pytest.approx([-0.0132911, 0.0403857, -0.0228774, -0.0100884], rel=1e-5)


def test_projections_back_into_the_residual_stream_start_smaller():
    model = Transformer(CONFIG)
    narrow = 0.02 / math.sqrt(2 * CONFIG.num_layers)
    for name, w in weights(model).items():
        if name.endswith("norm.weight"):
            assert torch.equal(w, torch.ones_like(w))
            continue
        want = narrow if name.endswith((".o.weight", ".down.weight")) else 0.02
        assert w.std().item() == pytest.approx(want, rel=0.05), name
        assert abs(w.mean().item()) < 5 * want / math.sqrt(w.numel()), name


def test_no_two_parameters_start_alike():
    """A seeded generator per stage, or per rank, would make layer 0 of every stage the same."""
    matrices = [w for w in weights(Transformer(CONFIG)).values() if w.dim() == 2]
    for i, a in enumerate(matrices):
        assert not any(torch.equal(a, b) for b in matrices[:i])


def test_every_dtype_starts_from_the_same_numbers():
    singles = weights(Transformer(CONFIG, seed=5))
    for dtype in (torch.float64, torch.bfloat16):
        for name, w in weights(Transformer(CONFIG, seed=5, dtype=dtype)).items():
            assert torch.equal(w, singles[name].to(dtype)), name


def test_a_meta_model_filled_unit_by_unit_has_the_same_weights():
    model = Transformer(CONFIG, seed=5, device="meta")
    assert all(p.is_meta for p in model.parameters())
    for i, block in reversed(model.layers.items()):
        initialize(block.to_empty(device="cpu"), CONFIG, 5, prefix=f"layers.{i}.")
    for name in ("head", "embedding", "norm"):
        initialize(getattr(model, name).to_empty(device="cpu"), CONFIG, 5, prefix=f"{name}.")
    want = weights(Transformer(CONFIG, seed=5))
    assert weights(model).keys() == want.keys()
    assert all(torch.equal(w, want[name]) for name, w in weights(model).items())


def test_a_parameter_without_memory_is_refused():
    with pytest.raises(ValueError, match=r"embedding.weight is on the meta device.*to_empty"):
        initialize(Transformer(CONFIG, device="meta"), CONFIG, 0)


def test_the_first_guess_is_nearly_even():
    tokens = torch.randint(64, (2, 32))
    assert Transformer(CONFIG).loss(tokens, tokens).item() == pytest.approx(math.log(64), rel=0.02)


def test_a_parameter_that_is_given_a_value_keeps_its_hooks():
    """Those from before, on the meta device, and those that come after."""
    param, called = nn.Parameter(torch.empty(2, device="meta")), []
    param.register_post_accumulate_grad_hook(lambda _: called.append("before"))
    materialise(param, torch.ones(2))
    param.register_post_accumulate_grad_hook(lambda _: called.append("after"))
    param.sum().backward()
    assert called == ["before", "after"]
