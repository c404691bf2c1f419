"""Attention of a split sequence, by whichever way, is the attention of the whole: outputs and every gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.context import all_gather_attention, ring_attention, ulysses_attention
from tests.context.programs import compare
from tests.context.strategies import Case, cases
from tests.examples import examples
from tests.strategies import assert_equal_to


def compare_all(world, drawn: list[Case]) -> None:
    for case in drawn:
        compare(world, case)


def some_cases_of_one_size():
    return st.integers(1, 8).flatmap(lambda p: st.lists(cases(sizes=st.just(p)), min_size=4, max_size=4))


@examples(12)  # of four cases each
@given(some_cases_of_one_size())
def test_outputs_and_gradients_are_those_of_one_process(drawn):
    minipar.run(compare_all, drawn, world_size=drawn[0].size)


EDGES = [
    Case("ring", 1),
    Case("ring", 4, seq_len=0),
    Case("ring", 4, "striped", seq_len=4),
    Case("ring", 4, "zigzag", lengths=(16,)),
    Case("ring", 4, "contiguous", padding=9),  # two ranks hold nothing but padding
    Case("ring", 4, "zigzag", causal=False, padding=9),
    Case("ulysses", 4, num_heads=8, group=4),  # two key/value heads for four ranks
    Case("ulysses", 4, num_heads=2, options=(("pad", True),)),  # two ranks without a head
    Case(
        "ulysses", 4, num_heads=6, group=2, options=(("pad", True),)
    ),  # rank 0 reads one head twice, another once
    Case("usp", 4, "zigzag", ulysses_size=2, num_heads=2),
    Case("usp", 4, "striped", ulysses_size=4, group=2),
    Case("all_gather", 4, "zigzag", num_heads=6, group=2, options=(("heads_at_once", 1),)),
]


@pytest.mark.parametrize("size", [1, 4])
def test_the_edges_too(size):
    minipar.run(compare_all, [case for case in EDGES if case.size == size], world_size=size)


def half_precision(world, attention: str) -> float:
    case = Case(attention, world.size, "zigzag", group=2, seq_len=32, head_dim=8)
    exact = case.local(case.whole(*case.qkv(torch.float64)), world.rank)
    mine = [case.local(x, world.rank).requires_grad_() for x in case.qkv(torch.bfloat16)]
    out = case.split(world, *mine)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in mine)
    return (out - exact).abs().max().item()


@pytest.mark.parametrize("attention", ["ring", "all_gather", "ulysses"])
def test_bf16_stays_near_the_exact_result(attention):
    assert max(minipar.run(half_precision, attention, world_size=4)) < 0.02


def repeated(world) -> None:
    """Two attentions in one graph, one through the other, twice over: messages of a step never meet another's."""
    case = Case("ring", world.size, "zigzag", seq_len=16)
    whole = [x.requires_grad_() for x in case.qkv()]
    mine = [case.local(x.detach(), world.rank).requires_grad_() for x in whole]
    for _ in range(2):
        case.split(world, case.split(world, *mine), *mine[1:]).square().sum().backward()
        case.whole(case.whole(*whole), *whole[1:]).square().sum().backward()
    for got, exact in zip(mine, whole):
        assert_equal_to(got.grad, case.local(exact.grad, world.rank))


def test_attentions_may_follow_each_other_in_one_graph():
    minipar.run(repeated, world_size=4)


def failing(world):
    case = Case("ring", world.size)
    mine = [case.local(x, world.rank) for x in case.qkv()]
    if world.rank == 1:
        raise RuntimeError("out of cheese")
    case.split(world, *mine)


def test_a_rank_that_fails_is_named_and_nobody_hangs():
    with pytest.raises(minipar.RankError, match="out of cheese") as error:
        minipar.run(failing, world_size=4, timeout_s=5)
    assert error.value.rank == 1


def refused(world) -> list[str]:
    lines = []
    q, k = torch.zeros(1, 6, 3, 4), torch.zeros(1, 2, 3, 4)
    for attempt in (
        lambda: ring_attention(world, q, k, k, layout="zigzag"),
        lambda: ring_attention(world, q, k, k, layout="spiral"),
        lambda: ulysses_attention(world, q, k, k),
        lambda: ring_attention(world, q[:, :5], k, k),
        lambda: all_gather_attention(world, q, k, k, heads_at_once=3),
    ):
        with pytest.raises(ValueError) as error:
            attempt()
        lines.append(str(error.value))
    return lines


def test_what_cannot_be_split_is_refused_with_what_would_work():
    zigzag, spiral, ulysses, heads, at_once = minipar.run(refused, world_size=4)[0]
    assert zigzag.startswith(
        "seq_len=12 is not a multiple of 8, as layout='zigzag' on 4 ranks needs; pad to 16"
    )
    assert spiral == "layout='spiral' is unknown; use contiguous, zigzag or striped"
    assert ulysses == (
        "4 ranks do not divide num_heads=6; use 1, 2, 3 or 6 ranks, pad to 8 heads, or give pad=True"
    )
    assert heads == "key/value heads=2 does not divide query heads=5; use 1 or 5"
    assert at_once == "heads_at_once=3 does not divide key/value heads=2; use 1 or 2"


@pytest.mark.parametrize("attention", [ring_attention, ulysses_attention, all_gather_attention])
def test_unless_told_attention_is_causal(attention):
    def alike(world):
        x = torch.randn(1, 1, 4, 2, generator=torch.Generator().manual_seed(0))
        y = attention(world, x, x, x)
        return [torch.equal(y, attention(world, x, x, x, causal=causal)) for causal in (True, False)]

    assert minipar.run(alike, world_size=1) == [[True, False]]
