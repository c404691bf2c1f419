import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.context_limits import LAYOUTS, length_multiple, padded_length
from minipar.context import causal_work, join_local, local_batch, local_positions, take_local
from minipar.model import IGNORE_INDEX
from tests.context.strategies import divisors

layouts = st.sampled_from(LAYOUTS)


@st.composite
def splits(draw):
    size, layout = draw(st.integers(1, 8)), draw(layouts)
    ulysses_size = draw(st.sampled_from(divisors(size)))
    return draw(st.integers(0, 4)) * length_multiple(size, layout, ulysses_size), size, layout, ulysses_size


@given(splits())
def test_every_token_is_on_one_rank_and_all_ranks_have_as_many(split):
    seq_len, size, layout, ulysses_size = split
    parts = [local_positions(seq_len, r, size, layout, ulysses_size) for r in range(size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(seq_len))
    assert {len(part) for part in parts} == {seq_len // size}


@given(splits(), st.integers(0, 2))
def test_what_is_taken_apart_is_joined_again(split, dim):
    seq_len, size, layout, ulysses_size = split
    x = torch.randn([2, 3, 4][:dim] + [seq_len] + [2, 3][dim:])
    parts = [take_local(x, r, size, layout, dim, ulysses_size) for r in range(size)]
    assert torch.equal(join_local(parts, layout, dim, ulysses_size), x)


def test_the_layouts_are_what_their_names_say():
    want = {"contiguous": [0, 1, 2, 3], "zigzag": [0, 1, 14, 15], "striped": [0, 4, 8, 12]}
    for layout, tokens in want.items():
        assert local_positions(16, 0, 4, layout).tolist() == tokens
    assert local_positions(16, 3, 4, "zigzag", ulysses_size=2).tolist() == [8, 9, 10, 11]


@given(st.integers(1, 8), st.integers(1, 6))
def test_zigzag_gives_every_rank_exactly_the_same_work(size, half):
    N = 2 * size * half
    work = [causal_work(N, r, size, "zigzag") for r in range(size)]
    assert work == [N * (N + 1) // 2 // size] * size
    n = N // size
    assert work[0] == n * ((2 * size - 1) * n // 2 + n // 2 + 1) // 2


@given(st.integers(1, 8), st.integers(1, 6))
def test_contiguous_and_striped_work_is_that_of_the_formulas(size, n):
    N = n * size
    for r in range(size):
        assert causal_work(N, r, size, "contiguous") == n * r * n + n * (n + 1) // 2
        assert causal_work(N, r, size, "striped") == n * (r + 1) + size * n * (n - 1) // 2


def test_contiguous_loads_the_last_rank_7_times_the_first():
    work = [causal_work(4096, r, 4, "contiguous") for r in range(4)]
    assert [round(w / work[0]) for w in work] == [1, 3, 5, 7]
    striped = [causal_work(4096, r, 4, "striped") for r in range(4)]
    assert max(striped) / min(striped) < 1.002


def tokens_and_targets(batch: int, seq_len: int):
    tokens = torch.arange(batch * seq_len).view(batch, seq_len)
    return tokens, tokens + 1


def test_padding_comes_last_and_predicts_nothing():
    tokens, targets = tokens_and_targets(2, 10)
    parts = [local_batch(tokens, targets, r, 4, "zigzag", pad=True) for r in range(4)]
    assert join_local([part.tokens for part in parts], "zigzag")[:, :10].equal(tokens)
    whole = join_local([part.targets for part in parts], "zigzag")
    assert whole[:, :10].equal(targets)
    assert whole[:, 10:].eq(IGNORE_INDEX).all()
    assert join_local([part.positions for part in parts], "zigzag", dim=0).tolist() == list(range(16))


def test_padding_is_a_document_of_its_own():
    tokens, targets = tokens_and_targets(1, 5)
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    parts = [local_batch(tokens, targets, r, 2, "zigzag", positions, pad=True) for r in range(2)]
    assert join_local([part.positions for part in parts], "zigzag").tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize(
    ("layout", "ulysses_size", "multiple", "padded"),
    [("contiguous", 1, 4, 12), ("striped", 1, 4, 12), ("zigzag", 1, 8, 16), ("zigzag", 2, 4, 12)],
)
def test_a_length_that_is_not_cut_is_refused_with_what_to_pad_to(layout, ulysses_size, multiple, padded):
    assert padded_length(10, 4, layout, ulysses_size) == padded
    assert padded_length(padded, 4, layout, ulysses_size) == padded
    with pytest.raises(ValueError) as error:
        local_batch(*tokens_and_targets(1, 10), 0, 4, layout, ulysses_size=ulysses_size)
    assert str(error.value) == (
        f"seq_len=10 is not a multiple of {multiple}, as layout={layout!r} on 4 ranks needs; "
        f"pad to {padded}, or give pad=True where a batch is split"
    )
