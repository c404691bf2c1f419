"""LAMB and Muon over lists of tensors give what their formulas give parameter by parameter; what is not finite is found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minipar.data_parallel.loss_scaler import all_finite
from minipar.extras.optimizers import muon as muon_module
from minipar.extras.optimizers.lamb import Lamb
from minipar.extras.optimizers.muon import Muon, newton_schulz
from minipar.extras.optimizers.tensor_lists import ROW_ELEMS, Rows
from minipar.support.live_bytes import LiveBytes
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds

SHAPES = [(), (3,), (0,), (ROW_ELEMS,), (ROW_ELEMS + 1,), (5, 7), (7, 5), (2, 3, 4)]
LR, BETAS, EPS, DECAY, STEPS = (0.1, 0.3), (0.9, 0.99), 1e-6, (0.1, 0.0), 3


def made(shapes, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def of_formula(w, grads, lr, decay):
    """LAMB's weight after these gradients; a step without one changes nothing, and does not count."""
    w, t = w.clone(), 0
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for g in grads:
        if g is None:
            continue
        t += 1
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        u = m / (1 - BETAS[0] ** t) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS) + decay * w
        norms = w.norm(), u.norm()
        w = w - lr * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * u
    return w


@given(
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6),
    st.lists(st.booleans(), min_size=18, max_size=18),
    st.sampled_from([0.0, 1.0]),
    seeds,
)
def test_lambs_step_is_its_formula(shapes, present, scale, seed):
    """In two groups and dtypes, with parameters that are empty, zero, transposed or sometimes without a gradient."""
    for dtype, rtol in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        weights = [scale * w.mT if w.dim() == 2 else scale * w for w in made(shapes, seed, dtype)]
        params = [nn.Parameter(w.clone()) for w in weights]
        other = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        groups = [
            {"params": params[i::2], "lr": LR[i], "weight_decay": DECAY[i]} for i in (0, 1) if params[i::2]
        ]
        optimizer = Lamb([*groups, {"params": [other], "lr": 0.5}], betas=BETAS, eps=EPS)
        seen = [[] for _ in params]
        for step in range(STEPS):
            for i, (param, g) in enumerate(
                zip(params, made([w.shape for w in weights], seed + step + 1, dtype))
            ):
                param.grad = g if present[STEPS * i + step] else None
                seen[i].append(param.grad)
            other.grad = torch.ones_like(other)
            optimizer.step()
        assert (other < 1).all()
        for i, (w, param) in enumerate(zip(weights, params)):
            want = of_formula(w, seen[i], LR[i % 2], DECAY[i % 2])
            torch.testing.assert_close(param.detach(), want, rtol=rtol, atol=rtol * 1e-2)


def test_a_step_of_lamb_takes_two_more_copies_of_the_parameters():
    params = [nn.Parameter(x) for x in made([(64, 64)] * 8 + [(ROW_ELEMS,)], 0)]
    optimizer = Lamb([{"params": params[::2]}, {"params": params[1::2]}])
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        with LiveBytes() as memory:
            optimizer.step()
    size = sum(param.nbytes for param in params)
    assert size < memory.peak <= 2.05 * size


@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8), seeds)
def test_every_tensor_in_rows_is_scaled_by_its_own_factor(shapes, seed):
    tensors, factors = made(shapes, seed), torch.arange(1.0, len(shapes) + 1)
    rows = Rows(tensors)
    torch._foreach_copy_(rows.parts, tensors)
    rows.scale(factors, rows.owners())
    for part, x, factor in zip(rows.parts, tensors, factors):
        assert torch.equal(part, x * factor)


@given(st.lists(st.sampled_from([(4, 6), (6, 4), (2, 4, 6), (3, 3)]), min_size=1, max_size=6),
       st.sampled_from([1, 48, 1 << 24]), seeds)  # fmt: skip
@examples(10)
def test_muons_step_per_matrix_does_not_depend_on_batching(shapes, at_once, seed):
    weights, grads = made(shapes, seed), made(shapes, seed + 1)
    params = [nn.Parameter(w.clone()) for w in weights]
    optimizer = Muon(params, lr=0.1, weight_decay=0.2)
    for param, g in zip(params, grads):
        param.grad = g
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon_module, "BATCH_ELEMS", at_once)
        optimizer.step()
    for w, g, param in zip(weights, grads, params):
        direction = newton_schulz((1 - 0.95**2) * g)
        want = (1 - 0.1 * 0.2) * w - 0.1 * 0.2 * max(w.shape[-2:]) ** 0.5 * direction
        assert_equal_to(param.detach(), want)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_one_inf_or_nan_anywhere_is_found(dtype):
    largest = torch.finfo(dtype).max
    for right in (
        torch.full((70,), largest, dtype=dtype),
        torch.zeros(0, dtype=dtype),
        -torch.ones((), dtype=dtype),
    ):
        assert all_finite(right)
    for wrong in (float("inf"), -float("inf"), float("nan")):
        for place in (0, 33, 69):
            x = torch.full((70,), -largest, dtype=dtype)
            x[place] = complex(0, wrong) if dtype.is_complex else wrong
            assert not all_finite(x)
