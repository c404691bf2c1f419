"""Bytes sent, counted by the ledger, are those of the formulas, to the byte."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.context import split_comm
from minipar.support.chunks import chunk_sizes
from tests.context.strategies import Case, cases
from tests.examples import examples

FLOAT64, FLOAT32, BF16 = 8, 4, 2


def sent(world, drawn: list[Case], dtype=torch.float64) -> list[tuple[int, int]]:
    """Bytes this rank sends forward, and backward, in each case."""
    world = world.using("ring")
    counts = []
    for case in drawn:
        if case.attention == "usp":
            split_comm(world, case.ulysses_size)
        mine = [case.local(x, world.rank).requires_grad_() for x in case.qkv(dtype)]
        world.traffic.reset()
        out = case.split(world, *mine)
        forward = world.traffic.sent_bytes
        out.sum().backward()
        counts.append((forward, world.traffic.sent_bytes - forward))
    return counts


def elements(case: Case) -> tuple[int, int]:
    """N h and N h_kv: elements of q, and of k, of the whole sequence."""
    tokens = case.batch * case.seq_len * case.head_dim
    return tokens * case.num_heads, tokens * case.num_heads // case.group


def ring_elements(case: Case) -> tuple[int, int]:
    kv, p = elements(case)[1], case.size
    return 2 * kv * (p - 1) // p, 4 * kv * (p - 1) // p


def same_size(attention):
    def drawn(p):
        of_size = cases(sizes=st.just(p), attentions=(attention,)).map(lambda case: case._replace(padding=0))
        return st.lists(of_size, min_size=3, max_size=3)

    return st.integers(1, 8).flatmap(drawn)


@examples(6)
@given(same_size("ring"))
def test_ring_sends_keys_and_values_once_forward_twice_backward(drawn):
    for counts in minipar.run(sent, drawn, world_size=drawn[0].size):
        assert counts == [tuple(FLOAT64 * n for n in ring_elements(case)) for case in drawn]


@examples(6)
@given(same_size("all_gather"))
def test_all_gather_sends_as_much_as_the_ring(drawn):
    for counts in minipar.run(sent, drawn, world_size=drawn[0].size):
        assert counts == [tuple(FLOAT64 * n for n in ring_elements(case)) for case in drawn]


def test_gradients_of_bf16_travel_in_float32():
    case = Case("ring", 4, "zigzag", group=2)
    forward, backward = ring_elements(case)
    want = (BF16 * forward, BF16 * forward + FLOAT32 * (backward - forward))
    assert minipar.run(sent, [case], torch.bfloat16, world_size=4) == [[want]] * 4


def test_ulysses_sends_a_pth_of_a_pth():
    """(2 + 2 kv/a) N h (P-1)/P^2: with all heads their own, 4 N h (P-1)/P^2."""
    for p in (1, 2, 4, 8):
        drawn = [
            Case("ulysses", p, layout, num_heads=8, group=group, seq_len=16, batch=2)
            for group in (1, 2, 4, 8)
            if 8 // group % p == 0
            for layout in ("contiguous", "zigzag")
        ]
        for counts in minipar.run(sent, drawn, world_size=p):
            for case, count in zip(drawn, counts):
                queries, keys = elements(case)
                want = FLOAT64 * (2 * queries + 2 * keys) * (p - 1) // p**2
                assert count == (want, want)
                assert case.group > 1 or want == FLOAT64 * 4 * queries * (p - 1) // p**2


def test_few_key_value_heads_are_sent_to_all_ranks_reading_them():
    """2 key/value heads for 4 ranks: as many bytes as 4 would be."""
    case = Case("ulysses", 4, num_heads=8, group=4)
    as_many = case._replace(group=2)
    counts = minipar.run(sent, [case, as_many], world_size=4)
    assert all(few == many for few, many in counts)


def heads_that_are_read(case: Case) -> int:
    """Key/value heads, each counted once for every rank whose queries read it."""
    of_ranks = torch.arange(case.num_heads).split(chunk_sizes(case.num_heads, case.size))
    return sum(len({head // case.group for head in heads.tolist()}) for heads in of_ranks)


def test_ulysses_counts_a_key_value_head_once_per_reading_rank():
    """Also where the ranks do not divide the key/value heads; and where they do not divide the heads, on the mean."""
    pad = (("pad", True),)
    for p, num_heads, kv_heads in (
        *(
            (2, 6, 3),
            (2, 6, 6),
            (2, 6, 1),
            (4, 12, 6),
            (4, 12, 3),
            (4, 12, 2),
            (3, 6, 2),
            (3, 12, 4),
            (4, 20, 5),
        ),
        *((2, 5, 5), (3, 4, 2), (4, 6, 3)),
    ):
        case = Case("ulysses", p, num_heads=num_heads, group=num_heads // kv_heads, seq_len=24, options=pad)
        heads = num_heads + heads_that_are_read(case)
        of_all = FLOAT64 * 2 * heads * case.head_dim * case.seq_len * (p - 1) // p
        counts = [count for (count,) in minipar.run(sent, [case], world_size=p)]
        assert tuple(map(sum, zip(*counts))) == (of_all, of_all), case
        if num_heads % p == 0 and (kv_heads % p == 0 or p % kv_heads == 0):
            assert heads_that_are_read(case) == max(kv_heads, p)
            assert counts == [(of_all // p, of_all // p)] * p


def test_ulysses_gathers_document_positions_and_a_ring_does_not():
    alone = [Case("ulysses", 4, batch=2), Case("ring", 4, batch=2)]
    with_documents = [case._replace(lengths=(10, 6), per_sample=True) for case in alone]
    for counts in minipar.run(sent, alone + with_documents, world_size=4):
        (ulysses, ring), (ulysses_documents, ring_documents) = counts[:2], counts[2:]
        assert ulysses_documents == (ulysses[0] + 8 * 2 * 16 * 3 // 4, ulysses[1])
        assert ring_documents == ring


def test_usp_sends_ulysses_inside_groups_and_a_ring_across_them():
    for groups, inside in ((2, 2), (4, 2), (2, 4), (1, 4), (4, 1)):
        p = groups * inside
        case = Case("usp", p, "zigzag", num_heads=8, group=2, seq_len=16, ulysses_size=inside)
        queries, keys = elements(case)
        exchange = (2 * queries + 2 * keys) // groups * (inside - 1) // inside**2
        ring = 2 * keys // inside * (groups - 1) // groups
        want = (FLOAT64 * (exchange + ring), FLOAT64 * (exchange + 2 * ring))
        assert minipar.run(sent, [case], world_size=p) == [[want]] * p
