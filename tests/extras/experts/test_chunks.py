"""Rows in chunks: the same rows, bytes and order, in more messages, and under way beside the products of other chunks."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.expert import expert_parallel
from minipar.expert.dispatched_rows import DispatchedRows
from minipar.expert.overlapped_all_to_all import OverlappedAllToAll
from minipar.extras.experts.chunked_rows import ChunkedAllToAll
from minipar.model import MoE
from minipar.support.trace import Trace
from tests.examples import examples

D, HIDDEN = 4, 3


@st.composite
def dispatches(draw):
    """(ranks, node_size, chunks, rows of each rank for each expert)"""
    p, each = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 2))
    node_size = draw(st.sampled_from([None, *(g for g in (1, 2) if p % g == 0)]))
    counts = [[draw(st.integers(0, 4)) for _ in range(p * each)] for _ in range(p)]
    return p, node_size, draw(st.integers(2, 4)), counts


def through(comm, counts, node_size, chunks):
    """What experts make of the rows, and the rows' gradients. The experts are exact whatever rows they get together."""
    first = comm.rank * len(counts) // comm.size

    def experts(rows, per_expert):
        number = torch.repeat_interleave(torch.arange(len(per_expert)), torch.tensor(per_expert))
        return rows * (first + number + 2.0)[:, None]

    rows = (torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(comm.rank))).requires_grad_()
    comm.traffic.reset()
    out = ChunkedAllToAll(comm, chunks, node_size)(rows, torch.tensor(counts)).through(experts)
    out.square().sum().backward()
    return out.detach(), rows.grad, comm.traffic.sent_bytes


@given(st.lists(dispatches(), min_size=3, max_size=3))
@examples(4)
def test_chunks_bring_the_bits_and_the_bytes_of_one(drawn):
    def body(world):
        for i, (p, node_size, chunks, counts) in enumerate(drawn):
            if world.rank < p:
                comm = world.subgroup(range(p), f"dispatch {i}")
                one, many = (through(comm, counts[comm.rank], node_size, c) for c in (1, chunks))
                assert torch.equal(many[0], one[0])
                assert torch.equal(many[1], one[1])
                assert many[2] == one[2]

    minipar.run(body, world_size=4)


def test_chunks_are_as_many_times_the_messages():
    def body(world):
        found = []
        for chunks in (1, 2, 4):
            moe = expert_parallel(MoE(D, HIDDEN, 8, 2, 1.0, seed=0), world, dispatch="chunks", chunks=chunks)
            world.traffic.reset()
            moe(torch.randn(2, 16, D))
            of_rows = world.traffic.by_kind["all_to_all"]
            found.append((world.traffic.messages, of_rows))
        return found

    for one, two, four in minipar.run(body, world_size=4):
        assert one[1] == two[1] == four[1]
        assert two[0] - one[0] == 2 * 3
        assert four[0] - one[0] == 3 * 2 * 3


def watched(world, chunks: int):
    """A layer whose products wait, before they end, for what should be under way beside them: the next chunk's rows and
    the last one's results, and the same of gradients. Returns the spans, and what did not arrive in time."""
    moe = expert_parallel(MoE(D, HIDDEN, 4, 2, None, seed=1), world, dispatch="chunks", chunks=chunks)
    sent, late, last = [], [], chunks - 1
    # Their order: rows of chunks 0 to `last`, results 0 to `last`; then from `last` to 0 gradients of results, and of rows.
    rows, results = list(range(chunks)), list(range(chunks, 2 * chunks))
    of_results, of_rows = ([first + last - i for i in range(chunks)] for first in (2 * chunks, 3 * chunks))

    def require(what: str, chunk: int, *numbers: int) -> None:
        for number in numbers:
            if number >= len(sent) or not sent[number].finished.wait(60):
                late.append(f"{what} {chunk}: message {number} of {len(sent)}")

    computed = []

    def after_product(module, inputs, out):
        i = len(computed)
        computed.append(i)
        require("forward", i, *rows[i + 1 : i + 2], *results[max(0, i - 1) : i])
        out.register_hook(
            lambda _: require("backward", i, *of_results[max(0, i - 1) : i], *of_rows[i + 1 : i + 2])
        )

    moe.experts.register_forward_hook(after_product)
    right = OverlappedAllToAll.begin

    def noted(self, *args):
        right(self, *args)
        sent.append(self._pending)

    world.trace = Trace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlappedAllToAll, "begin", noted)
        moe(torch.randn(2, 16, D, requires_grad=True))[0].sum().backward()
    spans, world.trace = world.trace.spans, None
    return spans, late, len(sent)


def test_chunks_travel_while_others_compute_in_both_passes():
    for spans, late, sent in minipar.run(watched, 3, world_size=2):
        assert late == []
        assert sent == 4 * 3
        products = [s for s in spans if s.kind == "compute"]
        travelled = [s for s in spans if s.kind == "communicate" and s.name.startswith("all_to_all")]
        assert [s.name for s in products] == [f"experts, chunk {i}" for i in range(3)]
        assert {s.lane for s in travelled}.isdisjoint({s.lane for s in products})
        for product, following in zip(products, travelled[1:3]):
            assert following.end_s <= product.end_s
        assert travelled[3].end_s <= products[1].end_s  # the first chunk's results


class SentWhenWanted(DispatchedRows):
    """The fault: a chunk leaves when the last one is computed."""

    def __init__(self, *args, **options):
        self.start = partial(super().__init__, *args, **options)

    def receive(self):
        self.start()
        return super().receive()


def test_chunks_that_wait_for_one_another_are_noticed():
    def faulty(world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minipar.extras.experts.chunked_rows.DispatchedRows", SentWhenWanted)
            return watched(world, 3)[1]

    for late in minipar.run(faulty, world_size=2):
        assert late[0] == "forward 0: message 1 of 1"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(dispatch="chunks", chunks=0), "dispatch.chunks=0 is out of range; use 1 or more"),
        (dict(dispatch="chunks", node_size=3), "node_size=3 does not divide ep=2; use 1 or 2"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    def body(world):
        moe = MoE(D, HIDDEN, 4)
        with pytest.raises(ValueError, match=says):
            expert_parallel(moe, world, **options)
        assert moe.experts.gate.shape[0] == 4  # nothing is changed

    minipar.run(body, world_size=2)
