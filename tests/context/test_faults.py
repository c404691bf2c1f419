"""Bugs that people ship, planted one at a time: the comparison with one process sees each of them."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import minipar
from minipar.context import attention_ring as ring
from minipar.context import ulysses
from minipar.model import flash, fused
from minipar.model.mask import Mask, TokenRun
from tests.context.programs import compare
from tests.context.strategies import Case
from tests.strategies import assert_equal_to


def no_log_sum_exp_correction():
    """As if every part of the keys weighed the same."""

    def average(out, lse, part_out, part_lse):
        out.copy_(part_out if lse.isinf().all() else (out + part_out) / 2)
        lse.copy_(torch.logaddexp(lse, part_lse))

    return [mock.patch.object(module, "merge_", average) for module in (flash, fused)]


def mask_by_local_position():
    return [mock.patch.object(ring, "local_runs", lambda N, rank, size, layout: (TokenRun(0, N // size),))]


def gradients_out_of_step_with_their_owner():
    """The gradient of k and v goes a rank too far on every way: it comes home to another owner."""
    start_shift = ring.Ring.start_shift

    def too_far(self, x, kind="ring_attention"):
        handle = start_shift(self, x, kind)
        if kind == "ring_attention":
            return handle
        x, rank, p = handle.wait(), self.comm.rank, self.comm.size
        return self.comm.exchange(x, (rank + 1) % p, x.shape, x.dtype, (rank - 1) % p, async_op=True)

    return [mock.patch.object(ring.Ring, "start_shift", too_far)]


def gradients_never_sent_home():
    """Each rank keeps the gradients of the keys it was lent."""
    original = ring.Ring.start_shift

    def start_shift(self, x, kind="ring_attention"):
        if kind == "ring_attention":
            return original(self, x, kind)
        return SimpleNamespace(wait=lambda: torch.zeros_like(x))

    return [mock.patch.object(ring.Ring, "start_shift", start_shift)]


def ordered_as_the_ranks_are():
    """Ulysses under a zigzag layout, masked as if the ranks' tokens came one after another in the sequence."""
    return [mock.patch.object(ulysses, "order_of_gathered", lambda N, *layout: torch.arange(N))]


def documents_by_local_index():
    """A document's start taken from its tokens' places on this rank."""

    def bounds(self):
        low, high = original(self)
        return torch.arange(low.shape[-1]) - self.positions, high

    original = Mask.bounds
    return [mock.patch.object(Mask, "bounds", bounds)]


RING = Case("ring", 4, "zigzag", group=2, seq_len=24)
FAULTS = [
    (no_log_sum_exp_correction, RING),
    (no_log_sum_exp_correction, RING._replace(impl="tiled")),
    (mask_by_local_position, RING._replace(layout="contiguous")),
    (mask_by_local_position, RING),
    (gradients_out_of_step_with_their_owner, RING),
    (gradients_never_sent_home, RING),
    (ordered_as_the_ranks_are, Case("ulysses", 4, "zigzag", seq_len=24)),
    (documents_by_local_index, RING._replace(lengths=(5, 12, 7))),
]


def said_with(world, fault, case: Case) -> str:
    """What the comparison says with the fault in; it is taken out again, for ranks outlive a call."""
    patches = fault()
    for patch in patches:
        patch.start()
    try:
        compare(world, case)
        return "nothing"
    except AssertionError as error:
        return str(error)
    finally:
        for patch in patches:
            patch.stop()


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_planted_bug_is_seen(fault, case):
    said = minipar.run(said_with, fault, case, world_size=4)
    assert any("max|a - b|" in line for line in said), said


def test_without_a_bug_nothing_is_seen():
    for case in {case for _, case in FAULTS}:
        assert minipar.run(said_with, list, case, world_size=4) == ["nothing"] * 4


def gradients_of_queries_keys_and_values(world, fault, case: Case):
    """The gradients on this rank, and how often it has passed on gradients of keys and values."""
    patches, kinds = fault(), []
    for patch in patches:
        patch.start()
    start_shift = ring.Ring.start_shift

    def counted(self, x, kind="ring_attention"):
        kinds.append(kind)
        return start_shift(self, x, kind)

    patches.append(mock.patch.object(ring.Ring, "start_shift", counted))
    patches[-1].start()
    try:
        mine = [case.local(x, world.rank).requires_grad_() for x in case.qkv()]
        case.split(world, *mine).square().sum().backward()
        return [x.grad for x in mine], kinds.count("ring_attention_gradients")
    finally:
        for patch in reversed(patches):
            patch.stop()


def test_sums_of_key_gradients_are_home_after_p_less_one_hops():
    """A sum that is one hop out of step goes to another owner: shapes are right, and so are the gradients of queries."""
    P, whole = RING.size, [x.requires_grad_() for x in RING.qkv()]
    RING.whole(*whole).square().sum().backward()
    right, wrong = (
        minipar.run(gradients_of_queries_keys_and_values, fault, RING, world_size=P)
        for fault in (list, gradients_out_of_step_with_their_owner)
    )
    for rank, ((grads, gradient_hops), (out_of_step, _)) in enumerate(zip(right, wrong)):
        assert gradient_hops == P - 1
        for got, exact in zip(grads, whole):
            assert_equal_to(got, RING.local(exact.grad, rank), floor=1e-13)
        assert [x.shape for x in out_of_step] == [x.shape for x in grads]
        close = [torch.allclose(a, b) for a, b in zip(out_of_step, grads)]
        assert close == [True, False, False]
