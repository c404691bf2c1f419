"""Under torch.autocast our products run in 16 bits, as torch's do: the same dtypes, and gradients equal up to rounding."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minipar
from minipar import ModelConfig, Transformer
from minipar.context import all_gather_attention, ring_attention
from minipar.model import flash_attention
from minipar.model.deferrable_linear import WeightGradients, defer_weight_gradients, linear
from minipar.tensor_parallel import tensor_parallel

BF16 = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def close(found, want):
    """Whether two gradients or outputs have one dtype, and differ by no more than bfloat16's rounding."""
    assert found.dtype == want.dtype
    assert (found - want).norm() <= 0.03 * want.norm()


def leaves(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def products(function, *shapes):
    inputs = leaves(*shapes)
    with BF16():
        y = function(*inputs)
    y.float().square().sum().backward()
    return [y.detach(), *(x.grad for x in inputs)]


def test_a_linear_layer_gives_torchs_gradients_bit_for_bit():
    shapes = (2, 3, 8), (4, 8), (4,)
    for found, want in zip(products(linear, *shapes), products(F.linear, *shapes)):
        assert found.dtype == want.dtype
        assert torch.equal(found, want)


def test_attention_gives_torchs_dtypes_and_gradients():
    shapes = [(2, 4, 16, 8)] * 3
    want = products(functools.partial(F.scaled_dot_product_attention, is_causal=True), *shapes)
    for impl in ("tiled", "auto"):
        for x, y in zip(products(functools.partial(flash_attention, impl=impl), *shapes), want):
            close(x, y)


def test_float64_stays_as_it_is():
    x, w = (t.detach().double().requires_grad_() for t in leaves((3, 8), (4, 8)))
    with BF16():
        y = linear(x, w)
    assert torch.equal(y, F.linear(x, w))


def _context(world):
    shapes = [(2, 4, 16 // world.size, 8)] * 3
    attentions = ring_attention, all_gather_attention
    return [[x.dtype for x in products(functools.partial(a, world), *shapes)] for a in attentions]


def test_attention_over_ranks_gives_torchs_dtypes():
    for dtypes in minipar.run(_context, world_size=2):
        assert dtypes == [[torch.bfloat16, *[torch.float32] * 3]] * 2


def config(kind):
    options = {
        "moe": {"num_experts": 2},
        "tied": {"tie_embeddings": True},
        "latent": {"kv_latent_dim": 8},
        "qwen": {"qkv_bias": True, "qk_norm": True},
    }.get(kind, {})
    heads = {} if kind == "latent" else {"num_kv_heads": 2}
    return ModelConfig(
        vocab_size=16, dim=16, num_layers=2, num_heads=4, hidden_dim=32, max_seq_len=8, **heads, **options
    )


def trained(model, autocast):
    tokens = torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(1))
    with BF16(enabled=autocast):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def _split(world, kind, options):
    model = tensor_parallel(Transformer(config(kind), seed=0), world, **options)
    loss, gradients = trained(model, True)
    return loss, {name: x.dtype for name, x in gradients.items()}, gradients["norm.weight"]


@pytest.mark.parametrize("kind", ["dense", "moe", "tied", "latent", "qwen"])
def test_the_transformer_trains_under_autocast_whole_and_split(kind):
    want_loss, want = trained(Transformer(config(kind), seed=0), False)
    model = Transformer(config(kind), seed=0)
    queue = WeightGradients()
    defer_weight_gradients(model, queue)
    loss, gradients = trained(model, True)
    queue.run()
    assert loss == pytest.approx(want_loss, rel=1e-2)
    for name, gradient in gradients.items():
        close(gradient, want[name])
    for options in ({}, {"sequence_parallel": True, "chunked": True}):
        for loss, dtypes, gradient in minipar.run(_split, kind, options, world_size=2):
            assert loss == pytest.approx(want_loss, rel=1e-2)
            assert set(dtypes.values()) == {torch.float32}
            close(gradient.as_subclass(torch.Tensor), want["norm.weight"])


def somebodys():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 6))


def _by_plan(world):
    model = somebodys()
    cut = {"0": "column", "2": "row", "3": "gathered"} if world is not None else {}
    if world is not None:
        tensor_parallel(model, world, plan=cut)
    with BF16():
        y = model(torch.linspace(-1, 1, 24).view(3, 8))
    y.float().square().sum().backward()
    return y.detach(), model[2].bias.grad


def test_a_model_split_by_a_plan_gives_torchs_numbers_under_autocast():
    want = _by_plan(None)
    for found in minipar.run(_by_plan, world_size=2):
        for x, y in zip(found, want):
            close(x, y)
