"""Context parallelism of the cache: the logits of one process, the bytes of the formulas, and the faults people make."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.context import attention_ring
from minipar.inference import split_keys
from minipar.inference.blocks import BlockPool, Pass, Rows, Share
from minipar.inference.paged_model import PagedModel
from minipar.inference.split_keys import SplitCore, goes_by_ring, ring_elems, split_keys_elems
from minipar.mesh import Mesh
from tests.examples import examples
from tests.inference.meshes import read_in_pieces
from tests.inference.test_engine import plant
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


def read_on(world, config, passes, dtype=torch.float64, fault=None):
    """On a rank: read texts in pieces. Return of each pass all its logits, on the first rank, and the bytes sent by kind.

    passes  for each pass, how many tokens it reads of each text
    """
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            plant(patch, *FAULTS[fault])
        mesh, model = Mesh(world, cp=world.size), loud_model(config).to(dtype)
        cp, outcomes = mesh.comm("cp"), []
        paged = PagedModel(model, BlockPool(20, BLOCK), mesh=mesh)
        cp.traffic.reset()
        for rows, own in read_in_pieces(paged, passes):
            attention = dict(cp.traffic.by_kind)
            logits = split_keys.gather_logits(cp, rows, own)
            chosen = cp.traffic.by_kind.get("send", 0)
            outcomes.append((logits, attention, chosen))
            cp.traffic.reset()
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


MERGE = "merge_(out, lse, part[:, :, None, :-1], part[..., -1:])"
KEYS = "self.memory.read(self.of_pass.tables[i], num_tokens)"
FAULTS = {
    "every rank's keys weigh the same": (
        SplitCore, "_by_split_keys", MERGE, "out.add_(part[:, :, None, :-1] / self.cp.size)",
    ),
    "a neighbour's part merged twice": (
        SplitCore, "_by_split_keys", "in mine.unflatten(0, (self.cp.size, n))",
        "in [*mine.unflatten(0, (self.cp.size, n)), mine[:n]]",
    ),
    "a neighbour's keys read twice in the ring": (
        attention_ring._RingAttention, "forward", "kv.new_empty(0) if arriving is None else arriving.wait()",
        "[arriving and arriving.wait(), kv][1] if step else arriving.wait()",
    ),
    "the newest key not seen": (
        SplitCore, "_own_keys", f"return {KEYS}",
        f"return tuple(x.index_fill(2, torch.tensor([num_tokens - 1]), 0) for x in {KEYS})",
    ),
    "positions of this rank's tokens alone": (Pass, "of", "], t, share", "], t // share.size, share"),
    "masked as if a rank had consecutive tokens": (
        SplitCore, "_run", "TokenRun(tokens.start,", "TokenRun(begin + rank * len(tokens),",
    ),
}  # fmt: skip


def read_and_compare(fault=None):
    passes = [[14, 9], [3, 1], [1, 1]]
    ranks = minipar.run(read_on, config_of(), passes, torch.float64, fault, world_size=3)
    for (logits, _, _), want in zip(ranks[0][0], one_process(config_of(), passes)):
        assert_equal_to(logits, want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault):
    with pytest.raises(AssertionError, match=r"max\|a - b\| ="):
        read_and_compare(fault)
