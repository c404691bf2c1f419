"""ZeRO-1 and ZeRO-2 train bit for bit as DDP does, with the memory and the traffic of the paper; and real bugs are seen."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.data_parallel import DDP, ZeroOptimizer
from minipar.data_parallel.buckets import flat_bytes
from minipar.data_parallel.chunk_optimizer import step_chunks
from minipar.extras.optimizers.lamb import Lamb
from minipar.spec.memory import held_bytes, storages
from tests.data_parallel.training import OPTIMIZERS, Case, Net, batch, drawn_cases, groups_of, train
from tests.examples import examples
from tests.strategies import assert_equal_to


def buckets_of(case):
    return dict(
        bucket_mb=case.bucket_mb,
        first_bucket_mb=case.bucket_mb / 2,
        reduce=case.reduce,
        algorithm="ring",
    )


def by_ddp(world, case):
    optimizer_cls, options = OPTIMIZERS[case.optimizer]
    net = Net(case.width, case.seed)
    ddp = DDP(net, world, **buckets_of(case))
    return history_and_state(world, case, net, ddp, optimizer_cls(groups_of(net), **options), ddp.no_sync)


def by_zero(world, case, zero_cls=ZeroOptimizer):
    optimizer_cls, options = OPTIMIZERS[case.optimizer]
    net = Net(case.width, case.seed + world.rank)  # different on each rank: rank 0's is what counts
    net.offset.copy_(Net(case.width, case.seed).offset)  # buffers are not the optimizer's
    optimizer = zero_cls(
        groups_of(net), optimizer_cls, world, stage=case.stage, **buckets_of(case), **options
    )
    return history_and_state(world, case, net, net, optimizer, optimizer.no_sync)


def history_and_state(world, case, net, called, optimizer, no_sync):
    """The parameters after every step, and the optimizer's state."""

    def parameters():
        return {n: p.detach().clone() for n, p in net.named_parameters()}

    history = [*train(case, called, optimizer, [world.rank], parameters, no_sync), parameters()]
    return history, getattr(optimizer, "full_state_dict", optimizer.state_dict)()


def by_both(world, drawn, zero_cls=ZeroOptimizer):
    return [(by_ddp(world, case), by_zero(world, case, zero_cls)) for case in drawn]


def assert_same_bits(got, want):
    """Parameters after every step, and the optimizer's whole state."""
    (got_history, got_state), (want_history, want_state) = got, want
    for step, (a, b) in enumerate(zip(got_history, want_history)):
        for name in b:
            assert torch.equal(a[name], b[name]), f"{name} after step {step}"
    assert got_state["state"].keys() == want_state["state"].keys()
    for number, state in want_state["state"].items():
        for key, value in state.items():
            mine = got_state["state"][number][key]
            same = torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value
            assert same, f"{key} of parameter {number}"
    assert got_state["param_groups"] == want_state["param_groups"]


@given(
    st.integers(1, 8),
    drawn_cases(bucket_mb=[1e-5, 1e-4, 5e-4, 1.0], optimizer=sorted(OPTIMIZERS), stage=[1, 2]),
)
@examples(15)
def test_both_stages_train_bit_for_bit_as_ddp_does(size, drawn):
    for results in minipar.run(by_both, drawn, world_size=size):
        for ddp, zero in results:
            assert_same_bits(zero, ddp)


CASE = Case()


class ForgetsToReduceTheLastBucket(ZeroOptimizer):
    def _finish(self):
        super()._finish()
        bucket = self.buckets[-1]
        bucket.gradient /= bucket.comm.size


class GivesTheNeighbourItsChunk(ZeroOptimizer):
    """The wrong owner: this rank updates its chunk with the gradient of the next one."""

    def _finish(self):
        super()._finish()
        for bucket in self.buckets:
            comm, chunk = bucket.comm, len(bucket.gradient)
            full = comm.all_gather(bucket.gradient.contiguous())
            owner = (comm.rank + 1) % comm.size
            bucket.gradient.copy_(full[owner * chunk : (owner + 1) * chunk])


class NeverGathers(ZeroOptimizer):
    def step(self, *args):
        list(step_chunks(self._chunks, self.param_groups, 1.0))


class ForgetsTheSchedule(ZeroOptimizer):
    """Options are those of the first step for good."""

    def step(self, *args):
        self._first = getattr(self, "_first", None) or [dict(g) for g in self.param_groups]
        now = [g["lr"] for g in self.param_groups]
        for group, first in zip(self.param_groups, self._first):
            group["lr"] = first["lr"]
        super().step(*args)
        for group, lr in zip(self.param_groups, now):
            group["lr"] = lr


@pytest.mark.parametrize(
    "broken", [ForgetsToReduceTheLastBucket, GivesTheNeighbourItsChunk, NeverGathers, ForgetsTheSchedule]
)
def test_real_bugs_are_seen(broken):
    ((ddp, zero),) = minipar.run(by_both, [CASE], broken, world_size=2)[0]
    with pytest.raises(AssertionError):
        assert_same_bits(zero, ddp)


# Accumulation, and calls in unusual order ---------------------------------------------------------------------------


def accumulated(world, stage, policy):
    """What a step of three microbatches sends: each reduced, or kept and reduced by the step, or by `synchronize`."""
    net = Net(5, 1)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, world, stage=stage, algorithm="ring",
                              bucket_mb=1e-4, first_bucket_mb=1e-4, lr=0.1, momentum=0.9)  # fmt: skip
    for step in range(2):
        optimizer.zero_grad()
        world.traffic.reset()
        for microbatch in range(3):
            with nullcontext() if policy == "reduce every" else optimizer.no_sync():
                net(batch(CASE, world.rank, step, microbatch), world.rank).backward()
        if policy == "synchronize":
            optimizer.synchronize()
        optimizer.step()
    flat = sum(flat_bytes(b.params, world.size, len(b.flagged)) for b in optimizer.buckets)
    return dict(world.traffic.by_kind), flat


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("policy", ["reduce every", "by step", "synchronize"])
def test_accumulation_costs_what_each_policy_says(stage, policy):
    for sent, flat in minipar.run(accumulated, stage, policy, world_size=3):
        assert sent["reduce_scatter"] == (3 if policy == "reduce every" else 1) * 2 * flat // 3
        assert sent["all_gather"] == 2 * flat // 3


# Memory and traffic ---------------------------------------------------------------------------------------------


def plain_layers(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 7)).to(
        dtype
    )


def measured(world, stage, mixed):
    """Bytes alive after two steps, at the end of the backward, and what one step sent."""
    before = storages()
    net = plain_layers(torch.bfloat16 if mixed else torch.float32)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, world, stage=stage, algorithm="ring",
                              bucket_mb=0.004, first_bucket_mb=0.001,
                              master_dtype=torch.float32 if mixed else None)  # fmt: skip
    x = torch.ones(1, 48, dtype=net[0].weight.dtype)
    for _ in range(2):
        optimizer.zero_grad()
        world.traffic.reset()
        net(x).float().sum().backward()
        alive = held_bytes(before) - x.nbytes
        optimizer.step()
    sent = dict(world.traffic.by_kind)
    flats = [flat_bytes(b.params, world.size, len(b.flagged)) for b in optimizer.buckets]
    elems = [sum(t.numel() for t in tensors) for tensors in (net.parameters(), optimizer.shards)]
    count = len(optimizer.shards), *elems
    return alive, sent, sum(flats) // net[0].weight.itemsize, len(flats), count


def all_measured(world):
    """Measured twice: at first torch imports, and the Comm sets aside, what they then keep."""
    cases = [(stage, mixed) for stage in (1, 2) for mixed in (False, True)]
    for case in cases:
        measured(world, *case)
    return {case: measured(world, *case) for case in cases}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7))]
)
def test_memory_and_traffic_are_the_papers(size):
    for result in minipar.run(all_measured, world_size=size):
        for (stage, mixed), (
            alive,
            sent,
            padded,
            num_buckets,
            (num_tensors, num_elems, own),
        ) in result.items():
            assert padded - num_elems <= num_tensors * 31 + num_buckets * (31 + 32 * size)
            whole, cut = FORMULAS[stage, mixed]
            # AdamW's two moments, 8 bytes, have no padding.
            assert alive == whole * padded + (cut - 8) * padded // size + 8 * own + 4 * num_tensors
            wide, narrow = (4, 2) if mixed else (4, 4)
            flags = -(-num_tensors // size) * size
            assert sent.get("reduce_scatter", 0) == (size - 1) * wide * padded // size
            assert sent.get("all_gather", 0) == (size - 1) * narrow * padded // size
            assert sent.get("all_reduce", 0) == 2 * (size - 1) * flags // size


# (stage, mixed precision) -> bytes of a parameter that every rank has, and those that are cut; AdamW
FORMULAS = {(1, True): (4, 12), (2, True): (2, 14), (1, False): (8, 8), (2, False): (4, 12)}


# State in and out -------------------------------------------------------------------------------------------------


def stepped(net, optimizer, steps):
    """Parameters after some steps with the same samples on all ranks."""
    for step in steps:
        optimizer.zero_grad()
        net(batch(CASE, 0, step), 0).backward()
        optimizer.step()
    return {n: p.detach() for n, p in net.named_parameters()}


def assert_same(got, want):
    for name, value in want.items():
        assert_equal_to(got[name], value, what=name)


def stopped(world, stage):
    net = Net(5, 1)
    optimizer = ZeroOptimizer(groups_of(net), torch.optim.AdamW, world, stage=stage, bucket_mb=1e-4, lr=0.01)
    stepped(net, optimizer, range(2))
    return net.state_dict(), optimizer.full_state_dict()


def resumed(world, stage, state, full):
    net = Net(5, 2)
    net.load_state_dict(state)
    optimizer = ZeroOptimizer(groups_of(net), torch.optim.AdamW, world, stage=stage, bucket_mb=3e-4, lr=0.5)
    optimizer.load_full_state_dict(full)
    return stepped(net, optimizer, range(2, 4))


@pytest.mark.parametrize(("stage", "sizes"), [(1, (1, 4)), (2, (3, 2)), (1, (4, 3))])
def test_the_full_state_resumes_on_other_ranks_and_in_torch(stage, sizes):
    state, full = minipar.run(stopped, stage, world_size=sizes[0])[0]
    net = Net(5, 2)
    net.load_state_dict(state)
    optimizer = torch.optim.AdamW(groups_of(net), lr=0.5)
    optimizer.load_state_dict(deepcopy(full))  # torch keeps what it is given, and would train it
    from_torch = deepcopy(optimizer.state_dict())
    want = stepped(net, optimizer, range(2, 4))
    for given_state in (full, from_torch):
        for params in minipar.run(resumed, stage, state, given_state, world_size=sizes[1]):
            assert_same(params, want)
        assert [group["lr"] for group in given_state["param_groups"]] == [0.01, 0.03]


# Optimizers that are not per element, and other bad input -----------------------------------------------------------


def by_lamb(world, drop_comm):
    net = Net(5, 1)
    optimizer = ZeroOptimizer(net.parameters(), Lamb, world, bucket_mb=1e-4, lr=0.1, weight_decay=0.1)
    if drop_comm:
        for chunk in optimizer._chunks:
            chunk.optimizer._comm = None
    return stepped(net, optimizer, range(3))


def test_lamb_sums_its_norms_and_leaving_that_out_is_refused():
    net = Net(5, 1)
    want = stepped(net, Lamb(net.parameters(), lr=0.1, weight_decay=0.1), range(3))
    for params in minipar.run(by_lamb, False, world_size=3):
        assert_same(params, want)
    with pytest.raises(minipar.RankError, match=r"of parameter .* it holds \d+ elements; pass the ranks"):
        minipar.run(by_lamb, True, world_size=3)
