"""fp8 products are the products of the nearest fp8 numbers, by whichever scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.extras.precision.fp8_linear import (
    Fp8Linear,
    Rounding,
    round_blocks_to_fp8,
    round_to_fp8,
    use_fp8,
)
from minipar.model import Transformer
from tests.strategies import seeds

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def every_number(kind: str) -> torch.Tensor:
    """All finite numbers of the format, by their bit patterns."""
    numbers = torch.arange(256, dtype=torch.uint8).view(TORCH_DTYPES[kind]).double()
    return numbers[numbers.isfinite()].unique()


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(3 * torch.randn(shape, generator=generator, dtype=torch.float64))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * sizes


@given(seed=seeds, kind=st.sampled_from(["e4m3", "e5m2"]), part=st.sampled_from([1.0, 0.5, 0.1]))
def test_rounding_takes_the_nearest_number_and_cuts_off_at_amax(seed, kind, part):
    x, numbers = draw(seed, 64), every_number(kind)
    amax = x.abs().amax() * part
    scaled = (x * LARGEST[kind] / amax).clamp(-LARGEST[kind], LARGEST[kind])
    found = round_to_fp8(x, kind, amax) * LARGEST[kind] / amax
    nearest = (scaled[:, None] - numbers).abs().amin(1)
    assert torch.allclose((found - scaled).abs(), nearest, rtol=1e-6, atol=1e-9)
    step, smallest = (16, 2.0**-9) if kind == "e4m3" else (8, 2.0**-16)
    assert (
        (found - scaled).abs() <= torch.maximum(scaled.abs() / step, torch.tensor(smallest / 2)) * (1 + 1e-6)
    ).all()


def test_zero_and_empty_tensors_are_rounded_to_themselves():
    for scaling in ("current", "delayed", "block"):
        rounding = Rounding("e4m3", scaling, 2, (1, 4))
        assert torch.equal(rounding(torch.zeros(3, 5)), torch.zeros(3, 5))
        assert rounding(torch.zeros(0, 5)).shape == (0, 5)


@given(
    seed=seeds,
    shape=st.tuples(st.integers(1, 7), st.integers(1, 9)),
    block=st.tuples(*[st.integers(1, 4)] * 2),
)
def test_each_block_has_a_scale_of_its_own(seed, shape, block):
    x, (rows, columns) = draw(seed, *shape), block
    want = x.clone()
    for i in range(0, shape[0], rows):
        for j in range(0, shape[1], columns):
            part = x[i : i + rows, j : j + columns]
            want[i : i + rows, j : j + columns] = round_to_fp8(part, "e4m3", part.abs().amax())
    assert torch.equal(round_blocks_to_fp8(x, "e4m3", rows, columns), want)


def test_a_large_number_costs_the_precision_of_its_own_block_alone():
    x = torch.full((2, 8), 1e-3)
    x[0, 0] = 1e4
    whole, blocks = round_to_fp8(x, "e4m3", x.abs().amax()), round_blocks_to_fp8(x, "e4m3", 1, 4)
    assert whole[1].eq(0).all()
    assert whole[0, 1:].eq(0).all()
    assert torch.allclose(blocks[1], x[1])
    assert torch.allclose(blocks[0, 4:], x[0, 4:])
    assert blocks[0, 1:4].eq(0).all()


def test_a_delayed_scale_is_that_of_the_last_calls():
    rounding = Rounding("e4m3", "delayed", 2, (1, 4))
    one, large = torch.full((1, 1), 1.0), torch.full((1, 1), 8.0)
    assert rounding(one) == 1  # without history, its own
    assert rounding(large) == 1  # cut off: larger than anything before
    assert rounding(large) == 8
    rounding(one), rounding(one)
    assert rounding(large) == 1  # forgotten after two calls


@given(seed=seeds, scaling=st.sampled_from(["current", "delayed", "block"]))
def test_a_layer_multiplies_rounded_numbers_forward_and_backward(seed, scaling):
    w, x, dy = draw(seed, 6, 5), draw(seed + 1, 2, 3, 5), draw(seed + 2, 2, 3, 6)
    layer = Fp8Linear(torch.nn.Parameter(w.clone()), scaling, block=2)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)

    def rounded(t, kind, rows):
        t = t.detach().reshape(-1, t.shape[-1])
        return (
            round_blocks_to_fp8(t, kind, rows, 2)
            if scaling == "block"
            else round_to_fp8(t, kind, t.abs().amax())
        )

    xq, wq, dyq = rounded(x, "e4m3", 1), rounded(w, "e4m3", 2), rounded(dy, "e5m2", 1)
    assert torch.equal(y.detach().flatten(0, 1), xq @ wq.t())
    assert torch.equal(x.grad.flatten(0, 1), dyq @ wq)
    assert torch.equal(layer.weight.grad, dyq.t() @ xq)
    assert torch.equal(layer.weight.detach(), w)


def losses(scaling: str | None) -> torch.Tensor:
    """Of 60 steps of a small model, whose blocks multiply in fp8 unless `scaling` is None."""
    tokens = torch.randint(7, (4, 17), generator=torch.Generator().manual_seed(0)).cumsum(1) % 11
    config = ModelConfig(vocab_size=11, dim=32, num_layers=2, num_heads=2, max_seq_len=16)
    model, found = Transformer(config, seed=1), []
    if scaling is not None:
        use_fp8(model.layers, scaling, block=16)
        assert sum(isinstance(m, Fp8Linear) for m in model.modules()) == 2 * 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.thorough
@pytest.mark.parametrize("scaling", ["current", "delayed", "block"])
def test_fp8_loss_falls_to_a_tenth_staying_near_float32(scaling):
    plain, fp8 = losses(None), losses(scaling)
    assert plain[-1] < plain[0] / 10
    assert fp8[-1] < fp8[0] / 10
    assert 0 < (fp8 - plain).abs().max() < plain[0] / 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(scaling="fine"), "scaling='fine' is unknown; use current, delayed or block"),
        (dict(history=0), "history=0"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Fp8Linear(torch.nn.Parameter(torch.ones(2, 2)), **options)
