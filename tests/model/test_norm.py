import pytest
import torch

from minipar.model import RMSNorm
from tests.strategies import assert_equal_to


def make_norm(dim, dtype=torch.float64, eps=1e-5):
    norm = RMSNorm(dim, eps, dtype=dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(0))
    return norm


def test_it_is_torchs_rms_norm():
    x, norm = torch.randn(3, 4, 10, dtype=torch.float64), make_norm(10)
    assert_equal_to(norm(x), torch.nn.functional.rms_norm(x, (10,), norm.weight, norm.eps), rtol=1e-14)


def test_epsilon_is_inside_the_root():
    x, norm = torch.full((1, 4), 1e-3, dtype=torch.float64), make_norm(4)
    assert_equal_to(norm(x), norm.weight * 1e-3 / (1e-6 + 1e-5) ** 0.5 * torch.ones(1, 4), rtol=1e-14)
    assert torch.equal(norm(torch.zeros(2, 4, dtype=torch.float64)), torch.zeros(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_are_normalised_in_float32(dtype):
    x, norm = torch.randn(64, 32).to(dtype) * 200, make_norm(32, dtype)  # squares overflow float16
    wide = torch.nn.functional.rms_norm(x.float(), (32,), eps=norm.eps)
    assert torch.equal(norm(x), norm.weight * wide.to(dtype))


def test_gradients_agree_with_finite_differences():
    norm = make_norm(6)
    assert torch.autograd.gradcheck(norm, torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True))
