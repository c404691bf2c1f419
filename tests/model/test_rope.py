import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.model import rotate, rotation
from tests.strategies import assert_equal_to, seeds


def turn(x, positions, theta=10000.0):
    return rotate(x, *rotation(positions, x.shape[-1], theta, x.dtype))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_each_pair_of_features_turns_by_position_times_its_frequency():
    x, theta = normal(1, 5, 2, 6), 100.0
    y = turn(x, torch.arange(5), theta)
    for t in range(5):
        for i in range(3):
            z = torch.complex(x[0, t, :, i], x[0, t, :, i + 3])
            z = z * torch.exp(torch.tensor(1j * t * theta ** (-2 * i / 6)))
            # angles are float32
            assert_equal_to(y[0, t, :, i], z.real, rtol=1e-6)
            assert_equal_to(y[0, t, :, i + 3], z.imag, rtol=1e-6)


@given(seed=seeds, m=st.integers(0, 50), n=st.integers(0, 50), shift=st.integers(0, 50))
def test_scores_depend_on_the_distance_between_positions_only(seed, m, n, shift):
    q, k = normal(1, 1, 1, 8, seed=seed), normal(1, 1, 1, 8, seed=seed + 1)

    def score(a, b):
        return (turn(q, torch.tensor([a])) * turn(k, torch.tensor([b]))).sum()

    assert (score(m, n) - score(m + shift, n + shift)).abs() < 1e-4  # float32 angles up to 100


@given(data=st.data())
def test_a_tokens_angles_do_not_depend_on_its_neighbours_bit_for_bit(data):
    """Ranks hold different parts of a sequence; vectorised cosines must not differ with a value's place."""
    whole = rotation(torch.arange(300), 6, 10000.0, torch.float32)
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 299), min_size=1, max_size=40)))
    for got, want in zip(rotation(positions, 6, 10000.0, torch.float32), whole):
        assert torch.equal(got, want[positions])


def test_positions_may_differ_from_sample_to_sample():
    x, positions = normal(2, 3, 2, 4), torch.tensor([[0, 1, 2], [7, 5, 9]])
    y = turn(x, positions)
    for b in range(2):
        assert torch.equal(y[b : b + 1], turn(x[b : b + 1], positions[b]))


def test_gradients_agree_with_finite_differences():
    x = normal(2, 3, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: turn(x, torch.tensor([3, 0, 8])), x)
    assert torch.autograd.gradcheck(lambda x: turn(x.transpose(1, 2), torch.tensor([3, 5])), x)
