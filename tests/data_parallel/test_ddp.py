"""DDP gives the gradients of one process: over drawn models, buckets, ranks, accumulation; and real bugs turn it red."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.config.model_config import ModelConfig
from minipar.data_parallel import DDP
from minipar.data_parallel.buckets import flat_bytes
from minipar.data_parallel.reductions import reduce_plainly
from minipar.mesh import placement_of
from minipar.model import Transformer, cross_entropy_sum
from minipar.support.trace import Trace
from tests.data_parallel.training import (
    Case,
    Net,
    assert_trained_as_one_process,
    drawn_cases,
    trained_on_ranks,
)
from tests.strategies import assert_equal_to


def trained(world, case: Case, wrap=DDP):
    net = Net(case.width, seed=case.seed + world.rank)  # different on each rank: rank 0's is what counts
    ddp = wrap(net, world, bucket_mb=case.bucket_mb, first_bucket_mb=case.bucket_mb / 2, reduce=case.reduce,
               algorithm=case.algorithm)  # fmt: skip
    return trained_on_ranks(world, case, ddp)


@given(
    st.integers(1, 8),
    drawn_cases(
        bucket_mb=[1e-5, 1e-4, 5e-4, 1.0], steps=[1, 2, 3], algorithm=["auto", "ring", "tree", "native"]
    ),
)
def test_ddp_trains_as_one_process_does(size, drawn):
    results = minipar.run(
        lambda world, drawn: [trained(world, case) for case in drawn], drawn, world_size=size
    )
    for case, of_ranks in zip(drawn, zip(*results)):
        assert_trained_as_one_process(of_ranks, case)


class AveragesTheParameter(DDP):
    """The hook reduces the parameter it is handed, not its gradient."""

    def __init__(self, module, comm, **options):
        super().__init__(module, comm, **options)
        self.reducer.on_gradient = self._on_gradient
        for param in self.reducer.bucket_of:
            param._post_accumulate_grad_hooks.clear()
            param.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, param):
        with torch.no_grad():
            self.buckets[0].comm.all_reduce_(param, "mean")


class NeverWritesBack(DDP):
    """A copy of the bucket is reduced."""

    def __init__(self, module, comm, **options):
        def reduce_a_copy(reduction):
            return reduce_plainly(reduction._replace(flat=reduction.flat.clone()))

        super().__init__(module, comm, **options, reduce_bucket=reduce_a_copy)


class DividesTwice(DDP):
    def _finish(self):
        super()._finish()
        for param in self.reducer.bucket_of:
            if param.grad is not None:
                param.grad /= self.buckets[0].comm.size


class ForgetsTheLastBucket(DDP):
    """A bucket that is not full is never sent."""

    def __init__(self, module, comm, **options):
        super().__init__(module, comm, **options)
        self.reducer._end_of_backward = lambda: (self._finish(), self.reducer.begin())
        self.reducer.end._finish = self.reducer._end_of_backward


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "broken", [AveragesTheParameter, NeverWritesBack, DividesTwice, ForgetsTheLastBucket]
)
def test_real_bugs_are_seen(broken):
    check_training(DDP)
    # Where one rank reduces what another does not, they wait for each other in vain before they differ.
    with pytest.raises((AssertionError, minipar.RankError)):
        check_training(broken, timeout_s=5.0)


def check_training(wrap, timeout_s=60.0):
    case = Case()
    assert_trained_as_one_process(minipar.run(trained, case, wrap, world_size=2, timeout_s=timeout_s), case)


# Losses over tokens ------------------------------------------------------------------------------------------------

CONFIG = ModelConfig(vocab_size=17, dim=16, num_layers=2, num_heads=2, max_seq_len=8, tie_embeddings=True)


def tokens_and_targets(size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 17, (2 * size, 8), generator=generator)
    targets = torch.randint(0, 17, (2 * size, 8), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.4] = -100
    targets[:2] = -100  # rank 0 has no token to count, and still takes part
    return tokens, targets


def language_model_gradients(world, seed: int, mean_of_means: bool):
    ddp = DDP(
        Transformer(CONFIG, seed=seed, dtype=torch.float64), world, reduce="mean" if mean_of_means else "sum"
    )
    tokens, targets = tokens_and_targets(world.size, seed)
    count = (targets != -100).sum()
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    logits = ddp(tokens[mine])
    local = (targets[mine] != -100).sum().clamp(min=1)
    (cross_entropy_sum(logits, targets[mine]) / (local if mean_of_means else count)).backward()
    return {name: p.grad for name, p in ddp.module.named_parameters()}


def assert_same_gradients(grads, model):
    for name, p in model.named_parameters():
        assert_equal_to(grads[name], p.grad, what=name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_sum_over_the_global_count_is_the_mean_of_one_process(size):
    model = Transformer(CONFIG, seed=size, dtype=torch.float64)
    model.loss(*tokens_and_targets(size, size)).backward()
    for grads in minipar.run(language_model_gradients, size, False, world_size=size):
        assert_same_gradients(grads, model)


def test_a_mean_of_means_is_seen():
    model = Transformer(CONFIG, seed=2, dtype=torch.float64)
    model.loss(*tokens_and_targets(2, 2)).backward()
    grads = minipar.run(language_model_gradients, 2, True, world_size=2)[0]
    with pytest.raises(AssertionError):
        assert_same_gradients(grads, model)


# Order of events ------------------------------------------------------------------------------------------------


def wait_at_once(reduction):
    handle = reduce_plainly(reduction)
    handle.wait()
    return handle


def order_of_events(world, reduce_bucket):
    """The backward of a chain of layers, as a list: gradient i is there, bucket i left, a wait for bucket i."""
    layers = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(5)))
    # A bucket a layer.
    ddp = DDP(layers, world, bucket_mb=1e-6, first_bucket_mb=1e-6, reduce_bucket=reduce_bucket)
    events = []
    all_reduce_ = world.all_reduce_

    def recorded(flat, *args, **kwargs):
        index = next(i for i, bucket in enumerate(ddp.buckets) if bucket.flat is flat)
        events.append(("left", index))
        handle = all_reduce_(flat, *args, **kwargs)
        wait = handle.wait
        handle.wait = lambda: (events.append(("wait", index)), wait())[1]
        return handle

    world.all_reduce_ = recorded
    for i, layer in enumerate(reversed(layers)):
        layer.weight.register_hook(lambda grad, i=i: events.append(("gradient", i)))
    ddp(torch.randn(4, 20)).sum().backward()
    return events


def assert_overlaps(events):
    last_gradient = max(i for i, (what, _) in enumerate(events) if what == "gradient")
    first_wait = min(i for i, (what, _) in enumerate(events) if what == "wait")
    assert events.index(("left", 0)) < last_gradient, "no bucket left before the backward ended"
    assert first_wait > last_gradient, "the backward waited for a bucket"


def test_buckets_leave_during_the_backward_without_waiting():
    for events in minipar.run(order_of_events, None, world_size=2):
        assert_overlaps(events)
        assert [index for what, index in events if what == "left"] == list(range(5))


def test_waiting_in_the_hook_is_seen():
    (events, _) = minipar.run(order_of_events, wait_at_once, world_size=2)
    with pytest.raises(AssertionError, match="waited"):
        assert_overlaps(events)


def communication_during_backward(world):
    layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
    ddp = DDP(layers, world, bucket_mb=0.2, first_bucket_mb=0.2)
    world.trace = Trace()
    loss = ddp(torch.randn(64, 300)).sum()
    with world.trace.span("compute", "backward"):
        loss.backward()
    return world.trace.spans


def test_all_reduces_run_on_their_own_lane_during_the_backward():
    for spans in minipar.run(communication_during_backward, world_size=2):
        (backward,) = [s for s in spans if s.kind == "compute"]
        sent = [s for s in spans if s.kind == "communicate"]
        assert len(sent) > 5
        assert all(s.lane != "main" and backward.start_s < s.start_s < backward.end_s for s in sent)


# Traffic, memory, edges -------------------------------------------------------------------------------------------


def traffic_and_memory(world, width, broadcast_buffers):
    net = Net(width, 0)
    buckets = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-4}
    ddp = DDP(net, world, **buckets, algorithm="ring", broadcast_buffers=broadcast_buffers)
    world.traffic.reset()
    ddp(torch.ones(2, width, dtype=torch.float64), world.rank).backward()
    storages = {
        p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
        for p in net.parameters()
        if p.grad is not None
    }
    flat = [flat_bytes(b.params, world.size, len(b.flagged)) for b in ddp.buckets]
    return dict(world.traffic.by_kind), flat, storages


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_traffic_and_gradient_memory_are_the_formulas(size, broadcast_buffers):
    of_buffers = 0
    for by_kind, flat, storages in minipar.run(traffic_and_memory, 7, broadcast_buffers, world_size=size):
        of_buffers += by_kind.pop("broadcast", 0)
        assert sum(by_kind.values()) == 2 * (size - 1) * sum(flat) // size
        assert set(by_kind) <= {"all_reduce"}
        assert sum(storages.values()) <= sum(flat)
        assert set(storages.values()) <= set(flat)
    assert of_buffers == (size - 1) * 8 * 7 * broadcast_buffers  # Net's only buffer has 7 elements of 8 bytes


def parameters_on_two_comms(world):
    pair = world.subgroup([world.rank // 2 * 2, world.rank // 2 * 2 + 1], "pair")
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    ddp = DDP(net, lambda p: pair if p is net[1].weight or p is net[1].bias else world, reduce="sum")
    ddp(torch.full((1, 4), float(world.rank + 1), dtype=torch.float64)).sum().backward()
    return net[1].bias.grad.item(), net[0].bias.grad / net[1].weight[0], net[1].weight.detach()


def test_each_parameter_is_reduced_over_its_own_comm():
    results = minipar.run(parameters_on_two_comms, world_size=4)
    assert [bias for bias, _, _ in results] == [2.0] * 4
    for _, first_over_weight, weight in results:
        total = sum(w for _, _, w in results)
        assert_equal_to(first_over_weight * weight[0], total[0])


class EndsWhenAwaited:
    """The handle of an all-reduce that writes as late as it may: when it is waited for."""

    def __init__(self, all_reduce):
        x = all_reduce.args[0]
        before = x.clone()
        self.wait = partial(x.copy_, all_reduce().clone())
        x.copy_(before)


def exception_after_a_bucket_left(world, set_to_none):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    ddp = DDP(net, world, reduce="sum", bucket_mb=1e-6, first_bucket_mb=1e-6)  # a bucket for each parameter
    world.custom = lambda kind, operation, **options: EndsWhenAwaited(operation)
    hook = net[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (100 * ddp(torch.ones(1, 3, dtype=torch.float64))).sum().backward()
    hook.remove()
    assert ddp.reducer.under_way, "no bucket left before the exception"
    net.zero_grad(set_to_none)
    ddp(torch.full((1, 3), world.rank + 1.0, dtype=torch.float64)).sum().backward()
    alone = copy.deepcopy(net)
    alone.zero_grad()
    for rank in range(world.size):
        alone(torch.full((1, 3), rank + 1.0, dtype=torch.float64)).sum().backward()
    return [(p.grad, q.grad) for p, q in zip(net.parameters(), alone.parameters())]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_interrupted_all_reduce_leaves_later_gradients_right(set_to_none):
    for pairs in minipar.run(exception_after_a_bucket_left, set_to_none, world_size=2):
        for got, want in pairs:
            assert_equal_to(got, want)


def half_precision(world):
    torch.manual_seed(0)
    net = nn.Linear(8, 8).bfloat16()
    ddp = DDP(net, world)
    out = ddp(torch.full((1, 8), world.rank + 1.0, dtype=torch.bfloat16))
    out.sum().backward()
    assert placement_of(net.weight).replicated == {"dp"}
    return net.weight.grad.float(), net.weight.grad.dtype


def test_bf16_gradients_and_the_placement_they_belong_to():
    for grad, dtype in minipar.run(half_precision, world_size=4):
        assert dtype == torch.bfloat16
        assert torch.equal(grad, torch.full((8, 8), 2.5))


def as_torchs(world):
    config = ModelConfig(vocab_size=31, dim=32, num_layers=2, num_heads=2, max_seq_len=16)
    ours = DDP(Transformer(config), world, algorithm="native")
    theirs = nn.parallel.DistributedDataParallel(Transformer(config), process_group=world.process_group())
    for ddp in (ours, theirs):
        optimizer = torch.optim.AdamW(ddp.parameters())
        for step in range(3):
            tokens = torch.randint(
                0, 31, (2, 16), generator=torch.Generator().manual_seed(10 * step + world.rank)
            )
            optimizer.zero_grad()
            F.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    return [(a.detach(), b.detach()) for a, b in zip(ours.parameters(), theirs.parameters())]


def test_it_is_a_drop_in_for_torchs_ddp_in_a_plain_loop():
    for pairs in minipar.run(as_torchs, world_size=2):
        for ours, theirs in pairs:
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
