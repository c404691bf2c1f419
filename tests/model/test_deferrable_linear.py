"""A weight gradient that waits has the same bits, costs the same products, and is made once."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import Linear, Transformer, WeightGradients, defer_weight_gradients, linear
from tests.model.products import CountProducts
from tests.strategies import assert_equal_to, float_dtypes, seeds

SMALL = ModelConfig(vocab_size=11, dim=8, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=16)


def make_linear(D, F_out, bias, dtype, seed):
    layer = Linear(D, F_out, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return layer


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def train_microbatches(model, split, num_microbatches=3):
    """Gradients of several microbatches; `split`: all weight gradients after the last input gradient."""
    generator = torch.Generator().manual_seed(5)
    queue, later = WeightGradients(), []
    defer_weight_gradients(model, queue if split else None)
    for _ in range(num_microbatches):
        tokens = torch.randint(model.config.vocab_size, (2, 2, 6), generator=generator)
        model.loss(*tokens).backward()
        later.append(queue.pop_all())
    for products in later:
        for product in products:
            product()
    return gradients(model)


@given(
    seed=seeds,
    dtype=float_dtypes,
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    bias=st.booleans(),
    transposed=st.booleans(),
    D=st.integers(1, 5),
    F_out=st.integers(1, 5),
)
def test_two_halves_give_the_bits_of_a_whole_backward_and_of_torch(
    seed, dtype, shape, bias, transposed, D, F_out
):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(*shape, D, generator=generator).to(dtype) for _ in range(2)]
    if transposed:
        inputs = [x.mT.contiguous().mT if x.dim() > 1 else x for x in inputs]
    dys = [torch.randn(*shape, F_out, generator=generator).to(dtype) for _ in range(2)]
    found = {}
    for how in ("whole", "halves", "torch"):
        layer = make_linear(D, F_out, bias, dtype, seed)
        queue = WeightGradients()
        layer.deferred = queue if how == "halves" else None
        ys, dxs = [], []
        for x, dy in zip(inputs, dys):
            x = x.detach().requires_grad_()
            y = F.linear(x, layer.weight, layer.bias) if how == "torch" else layer(x)
            y.backward(dy)
            ys.append(y.detach()), dxs.append(x.grad)
        if how == "halves":
            assert layer.weight.grad is None
            assert len(queue) == 2 * (1 + bias)
            queue.run()
            assert len(queue) == 0
        found[how] = ys + dxs + [p.grad for p in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found["halves"], found["whole"]))
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(found["whole"], found["torch"]):
        assert_equal_to(a, b, rtol=rtol, floor=1e-6 if dtype != torch.float64 else 1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_split_and_whole_backwards_give_the_same_gradient_bits(dtype):
    whole = train_microbatches(Transformer(SMALL, dtype=dtype), split=False)
    halves = train_microbatches(Transformer(SMALL, dtype=dtype), split=True)
    assert_same_bits(halves, whole)


def test_deferring_a_tied_head_changes_only_the_addition_order():
    config = ModelConfig(**{**vars(SMALL), "tie_embeddings": True})
    whole = train_microbatches(Transformer(config, dtype=torch.float64), split=False)
    halves = train_microbatches(Transformer(config, dtype=torch.float64), split=True)
    for name in whole:
        assert_equal_to(halves[name], whole[name], what=name)


def test_two_halves_run_exactly_the_products_of_a_whole_backward():
    tokens = torch.randint(11, (2, 2, 6))
    counts = {}
    for split in (False, True):
        model, queue = Transformer(SMALL), WeightGradients()
        defer_weight_gradients(model, queue if split else None)
        loss = model.loss(*tokens)
        with CountProducts() as whole_or_first:
            loss.backward()
        with CountProducts() as second:
            queue.run()
        counts[split] = (whole_or_first.count, second.count)
    num_linears = 7 * SMALL.num_layers + 1
    assert counts[False] == (2 * num_linears, 0)
    assert counts[True] == (num_linears, num_linears)


def test_two_passes_of_autograd_would_run_more_products():
    """What the queue is for: asking autograd for one half and then the other computes both twice."""
    x = torch.randn(3, 4, requires_grad=True)
    layers = [make_linear(4, 4, False, torch.float32, i) for i in range(6)]
    y = x
    for layer in layers:
        y = layer(y)
    with CountProducts() as products:
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        torch.autograd.grad(y.sum(), [layer.weight for layer in layers])
    assert products.count == 2 * 12


def test_without_an_input_gradient_the_backward_needs_no_weight():
    layer, kept = make_linear(4, 5, False, torch.float32, 0), []
    x = torch.randn(3, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    with CountProducts() as products:
        y.sum().backward()
    assert products.count == 1
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_input_and_weight_are_all_that_is_kept():
    layer, kept = make_linear(4, 5, True, torch.float32, 0), []
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), layer.weight.data_ptr()}


def test_a_frozen_weight_queues_nothing_and_passes_gradients_on():
    layer, queue, kept = make_linear(4, 5, True, torch.float64, 0), WeightGradients(), []
    layer.requires_grad_(False)
    layer.deferred = queue
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert [t.data_ptr() for t in kept] == [layer.weight.data_ptr()]
    y.sum().backward()
    assert len(queue) == 0
    assert layer.weight.grad is None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(3, 4))


@pytest.mark.parametrize("trained", [(), ("weight",), ("bias",)], ids=["none", "weight", "bias"])
def test_an_output_needs_gradients_only_if_a_parameter_does(trained):
    layer, queue = make_linear(4, 5, True, torch.float32, 0), WeightGradients()
    for name, p in layer.named_parameters():
        p.requires_grad_(name in trained)
    layer.deferred = queue
    y = layer(torch.ones(3, 4))
    assert y.requires_grad == bool(trained)
    if trained:
        y.sum().backward()
    assert len(queue) == len(trained)


def test_a_weight_that_is_computed_gets_its_gradient_at_once():
    source, queue = torch.randn(5, 4, requires_grad=True), WeightGradients()
    linear(torch.randn(3, 4), 2 * source, None, queue).sum().backward()
    assert len(queue) == 0
    assert source.grad is not None


def test_the_queue_is_the_one_that_was_set_when_forward_ran():
    layer, queue = make_linear(4, 5, False, torch.float32, 0), WeightGradients()
    defer_weight_gradients(layer, queue)
    deferred = layer(torch.randn(3, 4))
    defer_weight_gradients(layer, None)
    at_once = layer(torch.randn(3, 4))
    deferred.sum().backward()
    assert (len(queue), layer.weight.grad) == (1, None)
    at_once.sum().backward()
    assert len(queue) == 1
    assert layer.weight.grad is not None


def test_a_deferred_gradient_fires_no_hook_of_the_parameter():
    layer, fired = make_linear(4, 5, False, torch.float32, 0), []
    layer.weight.register_post_accumulate_grad_hook(fired.append)
    layer.deferred = WeightGradients()
    layer.weight.register_hook(fired.append)
    for x in (torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    layer.deferred.run()
    assert layer.weight.grad is not None
    assert fired == []


def test_gradients_agree_with_finite_differences():
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (5, 4), (5,)))
    assert torch.autograd.gradcheck(linear, (x, w, b))
    assert torch.autograd.gradgradcheck(linear, (x, w, b))


def test_a_forgotten_product_is_noticed(monkeypatch):
    """A seeded fault: the queue loses the last product of each microbatch."""
    whole = train_microbatches(Transformer(SMALL), split=False)
    honest = WeightGradients.pop_all
    monkeypatch.setattr(WeightGradients, "pop_all", lambda queue: honest(queue)[:-1])
    with pytest.raises((AssertionError, TypeError)):
        assert_same_bits(train_microbatches(Transformer(SMALL), split=True), whole)


def test_a_weight_changed_between_forward_and_backward_is_noticed():
    for queue in (None, WeightGradients()):
        layer = make_linear(4, 5, False, torch.float32, 0)
        layer.deferred = queue
        y = layer(torch.randn(3, 4, requires_grad=True))
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_product_that_has_run_holds_its_input_no_longer():
    queue, inputs, found = WeightGradients(), [], []

    def counted(product):
        found.append(sum(x() is not None for x in inputs))
        product()

    for _ in range(3):
        x = torch.randn(2, 4)
        inputs.append(weakref.ref(x.untyped_storage()))
        other = WeightGradients()
        linear(x, torch.nn.Parameter(torch.randn(3, 4)), None, other).sum().backward()
        queue.put(partial(counted, *other.pop_all()))
    del x, other
    queue.run()
    assert found == [3, 2, 1]
