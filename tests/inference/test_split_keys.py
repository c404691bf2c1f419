"""Context parallelism of the cache: the logits of one process, the bytes of the formulas, and the faults people make."""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.context.attention_ring import Ring
from minipar.inference import split_keys
from minipar.inference.blocks import BlockPool, Pass, Rows, Share, blocks_for
from minipar.inference.paged_model import PagedModel
from minipar.inference.split_keys import SplitCore, goes_by_ring, ring_elems, split_keys_elems
from minipar.mesh import Mesh
from minipar.support.errors import RankError
from tests.examples import examples
from tests.inference.texts import PROMPTS
from tests.model.texts import loud_model
from tests.strategies import assert_equal_to

BLOCK = 12  # every cp up to 4 divides it
LAYERS, DIM, VOCAB = 2, 16, 13


def config_of(num_heads=4, num_kv_heads=2) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB, dim=DIM, num_layers=LAYERS, num_heads=num_heads, num_kv_heads=num_kv_heads,
        max_seq_len=40,
    )  # fmt: skip


def read_on(world, config, passes, dtype=torch.float64, plant=None):
    """On a rank: read texts in pieces. Return of each pass all its logits, on the first rank, and the bytes sent by kind.

    passes  for each pass, how many tokens it reads of each text
    """
    with ExitStack() as stack:
        for patch in plant() if plant else ():
            stack.enter_context(patch)
        mesh, model = Mesh(world, cp=world.size), loud_model(config).to(dtype)
        cp, pool = mesh.comm("cp"), BlockPool(20, BLOCK)
        paged = PagedModel(model, pool, mesh=mesh)
        tables, read, outcomes = [[] for _ in PROMPTS], [0] * len(PROMPTS), []
        for counts in passes:
            rows = []
            for i, count in enumerate(counts):
                tokens = PROMPTS[i][read[i] : read[i] + count]
                read[i] += count
                missing = blocks_for(read[i], BLOCK) - len(tables[i])
                tables[i] += [pool.allocate() for _ in range(missing)]
                if count:
                    rows.append(Rows(tokens, read[i] - count, tables[i], num_chosen=count))
            cp.traffic.reset()
            own = paged(rows)
            attention = dict(cp.traffic.by_kind)
            logits = split_keys.gather_logits(cp, rows, own)
            chosen = cp.traffic.by_kind.get("send", 0)
            outcomes.append((logits, attention, chosen))
        return outcomes, sum(memory.nbytes for memory in paged.memories)


def one_process(config, passes, dtype=torch.float64):
    """The logits of each pass, [N, V], from the whole texts."""
    model, read, wanted = loud_model(config).to(dtype), [0] * len(PROMPTS), []
    with torch.no_grad():
        whole = [model(torch.tensor([prompt]))[0] for prompt in PROMPTS]
    for counts in passes:
        wanted.append(torch.cat([whole[i][read[i] : read[i] + count] for i, count in enumerate(counts)]))
        read = [begin + count for begin, count in zip(read, counts)]
    return wanted


@st.composite
def passes_of(draw):
    passes, left = [], [40] * len(PROMPTS)
    for _ in range(draw(st.integers(1, 4))):
        counts = [draw(st.sampled_from([0, 1, 1, 2, 5, 14])) for _ in PROMPTS]
        counts = [min(count, room) for count, room in zip(counts, left)]
        if sum(counts):
            passes.append(counts)
            left = [room - count for room, count in zip(left, counts)]
    return passes


@given(cp=st.sampled_from([2, 3, 4]), heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]), passes=passes_of())
@examples(25)
def test_every_piece_has_the_logits_of_one_process_and_its_bytes(cp, heads, passes):
    config = config_of(*heads)
    ranks = minipar.run(read_on, config, passes, world_size=cp)
    d, read = DIM // heads[0], [0] * len(PROMPTS)
    for i, want in enumerate(one_process(config, passes)):
        assert_equal_to(ranks[0][0][i][0], want)
        elems = dict(all_gather=0, all_to_all=0, ring_attention=0)
        read = [begin + count for begin, count in zip(read, passes[i])]
        for S, T in zip(read, passes[i]):
            if T and goes_by_ring(Rows([0] * T, S - T, []), cp, *heads, d):
                elems["ring_attention"] += ring_elems(S, cp, heads[1], d)
            else:
                elems["all_gather"] += (cp - 1) * T * heads[0] * d
                elems["all_to_all"] += (cp - 1) * T * heads[0] * (d + 1)
        for kind, number in elems.items():
            sent = sum(outcomes[i][1].get(kind, 0) for outcomes, _ in ranks)
            assert sent == number * LAYERS * 8, kind
        elsewhere = sum(t % cp > 0 for S, T in zip(read, passes[i]) for t in range(S - T, S))
        assert sum(outcomes[i][2] for outcomes, _ in ranks) == elsewhere * VOCAB * 8


def test_a_decode_step_sends_h_times_d_plus_1_a_token_and_layer():
    passes = [[30, 20, 13], [1, 1, 1]]
    ranks = minipar.run(read_on, config_of(), passes, world_size=2)
    sent = [outcomes[1][1] for outcomes, _ in ranks]
    h, d, tokens = 4, 4, 3
    assert sum(s["all_to_all"] for s in sent) == tokens * LAYERS * h * (d + 1) * 8
    assert sum(s["all_gather"] for s in sent) == tokens * LAYERS * h * d * 8
    assert not any("ring_attention" in s for s in sent)


def test_the_ranks_share_one_cache():
    for cp in (2, 4):
        ranks = minipar.run(read_on, config_of(), [[3]], world_size=cp)
        assert [held for _, held in ranks] == [20 * BLOCK * 2 * LAYERS * 2 * 4 * 8 // cp] * cp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close_to_one_process(dtype):
    passes = [[14, 1], [1, 14], [5, 1]]
    ranks = minipar.run(read_on, config_of(), passes, dtype, world_size=2)
    for (logits, _, _), want in zip(ranks[0][0], one_process(config_of(), passes)):
        error = (logits.double() - want).norm() / want.norm()
        assert error < {torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]


@given(size=st.integers(1, 5), blocks=st.integers(1, 4), begin=st.integers(0, 30), count=st.integers(0, 30))
def test_each_token_lies_on_one_rank_in_a_place_of_its_own(size, blocks, begin, count):
    shares = [Share(rank, size) for rank in range(size)]
    tokens = [list(share.tokens(begin, begin + count)) for share in shares]
    assert sorted(sum(tokens, [])) == list(range(begin, begin + count))
    assert max(map(len, tokens)) - min(map(len, tokens)) <= 1
    table = list(range(7, 7 + 61))
    for share, own in zip(shares, tokens):
        slots = [share.slot(table, t, blocks * size) for t in own]
        assert len(set(slots)) == len(own)
        assert [slot // blocks for slot in slots] == [table[t // (blocks * size)] for t in own]


@given(
    T=st.integers(2, 64), before=st.integers(0, 500), cp=st.integers(2, 8), kv=st.sampled_from([1, 2, 4, 8])
)
def test_a_piece_goes_the_way_that_sends_less(T, before, cp, kv):
    by_ring = ring_elems(before + T, cp, kv, 16) < split_keys_elems(T, cp, 8, 16)
    assert goes_by_ring(Rows([0] * T, before, []), cp, 8, kv, 16) == by_ring
    assert not goes_by_ring(Rows([0], before, []), cp, 8, kv, 16), "a decode's message does not grow"


def without_log_sum_exp_weights():
    """As if every rank's keys weighed the same."""

    def average(out, lse, part_out, part_lse):
        out.copy_(part_out if lse.isinf().all() else (out + part_out) / 2)
        lse.copy_(torch.logaddexp(lse, part_lse))

    return [mock.patch.object(split_keys, "merge_", average)]


def a_neighbours_part_merged_twice():
    merge = split_keys.merge_

    def twice(out, lse, part_out, part_lse):
        if not lse.isinf().all():
            merge(out, lse, part_out, part_lse)
        merge(out, lse, part_out, part_lse)

    return [mock.patch.object(split_keys, "merge_", twice)]


def a_neighbours_keys_read_twice_in_the_ring():
    """The last block of a ring is the neighbour's again, which the mask takes for another rank's."""
    attend, shift, came = Ring.attend, Ring.start_shift, []

    def attend_anew(self, q, k, v):
        came.clear()
        return attend(self, q, k, v)

    def start_shift(self, x, kind="ring_attention"):
        came.append(shift(self, x, kind).wait())
        return SimpleNamespace(wait=lambda: came[0])

    return [
        mock.patch.object(Ring, "attend", attend_anew),
        mock.patch.object(Ring, "start_shift", start_shift),
    ]


def the_newest_key_is_not_seen():
    own_keys = SplitCore._own_keys

    def too_few(self, i):
        keys, values = own_keys(self, i)
        keys = keys.clone()
        keys[:, :, -1:] = 0
        return keys, values

    return [mock.patch.object(SplitCore, "_own_keys", too_few)]


def positions_count_only_this_ranks_tokens():
    plain = Pass.of.__func__

    def of(cls, requests, block_size, device, share):
        made = plain(cls, requests, block_size, device, share)
        return made._replace(positions=made.positions // share.size)

    return [mock.patch.object(Pass, "of", classmethod(of))]


def masked_as_if_a_rank_had_consecutive_tokens():
    run = SplitCore._run

    def consecutive(self, rank, begin, end):
        made = run(self, rank, begin, end)
        return made._replace(start=begin + rank * made.length)

    return [mock.patch.object(SplitCore, "_run", consecutive)]


FAULTS = [
    without_log_sum_exp_weights,
    a_neighbours_part_merged_twice,
    a_neighbours_keys_read_twice_in_the_ring,
    the_newest_key_is_not_seen,
    positions_count_only_this_ranks_tokens,
    masked_as_if_a_rank_had_consecutive_tokens,
]


def read_and_compare(plant=None):
    passes = [[14, 9], [3, 1], [1, 1]]
    ranks = minipar.run(read_on, config_of(), passes, torch.float64, plant, world_size=3)
    for (logits, _, _), want in zip(ranks[0][0], one_process(config_of(), passes)):
        assert_equal_to(logits, want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_seen(plant):
    with pytest.raises(AssertionError, match=r"max\|a - b\| ="):
        read_and_compare(plant)


def test_without_a_fault_the_same_pieces_are_equal():
    read_and_compare()


def test_blocks_that_cp_does_not_divide_are_refused():
    def make(world):
        PagedModel(loud_model(config_of()), BlockPool(4, 5), mesh=Mesh(world, cp=2))

    with pytest.raises(RankError, match="cp=2 does not divide block_size=5; use 1 or 5"):
        minipar.run(make, world_size=2)
