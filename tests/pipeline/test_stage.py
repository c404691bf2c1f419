"""What a stage keeps and computes: measured on real ranks, with tensors that report when they are gone."""

from __future__ import annotations

import inspect
import weakref

import pytest
import torch
from hypothesis import given
from torch import nn

import minipar
from minipar import DDP, FSDP
from minipar.model import Linear, Transformer
from minipar.model.overrides import GradientSync
from minipar.pipeline import Pipeline, measured
from minipar.pipeline.mailbox import Outbox
from minipar.schedules.gpipe import gpipe
from minipar.schedules.one_f_one_b import one_f_one_b
from minipar.schedules.schedule import output_key
from minipar.schedules.simulate import simulate
from minipar.schedules.zero_bubble import zb_h1, zb_h2
from tests.model.products import CountProducts
from tests.pipeline.programs import make_batch, mean_square, own_stages, pipeline_for, small_config
from tests.pipeline.strategies import schedules
from tests.schedules.families import WHOLE_SAMPLES
from tests.strategies import assert_equal_to


def _products(world, config, schedule, batch):
    pipeline = Pipeline(own_stages(Transformer(config), schedule, world.rank), world, schedule)
    with CountProducts() as products:
        pipeline.step(*batch)
    return products.seen


def test_split_backwards_run_exactly_the_products_of_whole_ones():
    """Plain attention, so that its products are counted too: 7 matrices a layer, and 2 products in attention."""
    config = small_config(4, attention="plain", tie_embeddings=True)
    batch = make_batch(config, 4)
    counts = {
        schedule.name: minipar.run(_products, config, schedule, batch, world_size=2)
        for schedule in (one_f_one_b(2, 4), zb_h1(2, 4), zb_h2(2, 4))
    }
    assert counts["zb-h1"] == counts["1f1b"]
    assert counts["zb-h2"] == counts["1f1b"]
    layers, head = 2 * (7 + 2), 1
    assert [sum(seen.values()) for seen in counts["1f1b"]] == [4 * 3 * layers, 4 * 3 * (layers + head)]


def without_gradients(world, config, batch, schedule):
    stages = own_stages(Transformer(config), schedule, world.rank)
    Pipeline(stages, world, schedule).step(*batch)
    stages[0].zero_grad()
    x = batch[0] if world.rank == 0 else torch.ones(2, 4, config.dim, dtype=stages[0].norm.weight.dtype)
    stages[0](x).sum().backward()
    return [name for name, p in stages[0].named_parameters() if p.grad is None]


def test_after_a_split_step_a_backward_outside_defers_nothing():
    config = small_config(4)
    assert minipar.run(without_gradients, config, make_batch(config, 4), zb_h1(2, 4), world_size=2) == [
        [],
        [],
    ]


class Watched(nn.Module):
    """A linear layer whose input is counted as long as it lives."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(4, 4)
        nn.init.ones_(self.linear.weight)
        self.live = self.peak = 0

    def forward(self, x):
        h = x * 1.0
        self.live += 1
        self.peak = max(self.peak, self.live)
        weakref.finalize(h, self._gone)
        return self.linear(h)

    def _gone(self):
        self.live -= 1


class Both:
    """The live inputs of several stages of one rank, as one count."""

    def __init__(self, stages):
        self.stages, self.peak = stages, 0
        for stage in stages:
            stage.register_forward_hook(lambda *_: self.look())

    def look(self):
        self.peak = max(self.peak, sum(stage.live for stage in self.stages))


def _live(world, schedule, batch):
    if world.rank >= schedule.num_ranks:
        return None
    comm = world.subgroup(range(schedule.num_ranks), "pp")
    stages = [Watched() for _ in schedule.stages_of(comm.rank)]
    counter = Both(stages)
    pipeline = pipeline_for(schedule)(stages, comm, schedule, loss_fn=mean_square)
    pipeline.step(*batch)
    left = sum(stage.live for stage in stages)
    return counter.peak, left, pipeline.spans


@given(schedules(WHOLE_SAMPLES, max_ranks=4, max_microbatches=8))
def test_ranks_hold_the_simulated_activations_in_schedule_order(schedule):
    batch = torch.randn(schedule.num_microbatches, 4), torch.randn(schedule.num_microbatches, 4)
    found = minipar.run(_live, schedule, batch, world_size=4)[: schedule.num_ranks]
    assert tuple(peak for peak, _, _ in found) == simulate(schedule).peak_live
    assert [left for _, left, _ in found] == [0] * schedule.num_ranks
    timeline = measured(schedule, [spans for _, _, spans in found])
    for actions in schedule.actions:
        starts = [timeline.spans[action][0] for action in actions]
        assert starts == sorted(starts)
    ends = {output_key(action): end for action, (_, end) in timeline.spans.items()}
    for action, (start, _) in timeline.spans.items():
        assert all(ends[output_key(need)] <= start for need in schedule.needs(action))
    assert timeline.peak_live == simulate(schedule).peak_live


class Sent(nn.Module):
    """Watches the memory of its outputs, which its own graph does not keep."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.outputs = []

    def forward(self, x):
        out = x * self.weight
        self.outputs.append(out.untyped_storage()._weak_ref())
        return out


def _outputs_at_first_backward(world, batch):
    """On rank 0, how many outputs are alive when its first backward starts and all have been received."""
    schedule = gpipe(2, 4)
    stage = Sent()
    alive = []

    def look(_):
        for handle in pipeline._mailbox._outbox._handles:
            handle.wait()  # they have left: the other rank has run all its forwards
        alive.append(sum(not torch.UntypedStorage._expired(ref) for ref in stage.outputs))

    pipeline = Pipeline([stage], world, schedule, loss_fn=mean_square)
    pipeline._mailbox._outbox = Outbox(held_bytes=0)
    if world.rank == 0:
        stage.weight.register_hook(look)
    pipeline.step(*batch)
    return alive


def test_an_output_is_dropped_once_it_is_sent():
    batch = torch.randn(4, 4), torch.randn(4, 4)
    alive = minipar.run(_outputs_at_first_backward, batch, world_size=2)[0]
    assert alive == [0, 0, 0, 0]


def _other_modules(world, schedule, batch, frozen):
    stages = make_stages(schedule.num_stages, frozen)
    own = [stages[s] for s in schedule.stages_of(world.rank)]
    loss = Pipeline(own, world, schedule, loss_fn=mean_square).step(*batch)
    named = {s: [p.grad for p in stages[s].parameters()] for s in schedule.stages_of(world.rank)}
    return loss, named


class Turned(nn.Module):
    """Returns a view that is not contiguous, and has a layer whose weight gradient can't wait."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x).tanh().transpose(1, 2)


class Deaf(nn.Module):
    """Does not use its input: no gradient comes back through it."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.ones(1, 6, 6, dtype=torch.float64))

    def forward(self, x):
        return self.value.expand(x.shape[0], 6, 6)


def make_stages(num_stages: int, special: str):
    torch.manual_seed(0)
    stages = [Turned() for _ in range(num_stages)]
    if special == "identity":
        stages[1] = nn.Identity()
    elif special == "deaf":
        stages[1] = Deaf()
    elif special.startswith("frozen"):
        stages[int(special[-1])].requires_grad_(False)
    return stages


@pytest.mark.parametrize("special", ["none", "identity", "deaf", "frozen 0", "frozen 1", "frozen 2"])
@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zb_h1(3, 2)], ids=lambda s: s.name)
def test_stages_may_be_any_modules(schedule, special):
    """To rounding: what is sent arrives contiguous, whatever its strides were."""
    m = schedule.num_microbatches
    batch = (
        torch.randn(8, 6, 6, dtype=torch.float64).transpose(1, 2),
        torch.randn(8, 6, 6, dtype=torch.float64),
    )
    parts = minipar.run(_other_modules, schedule, batch, special, world_size=3)
    stages = make_stages(3, special)
    total = 0
    for x, target in zip(batch[0].split(8 // m), batch[1].split(8 // m)):
        loss = mean_square(nn.Sequential(*stages)(x), target) / m
        loss.backward()
        total = total + loss.detach()
    assert_equal_to(parts[-1][0], total)
    for s, stage in enumerate(stages):
        for got, p in zip(parts[s][1][s], stage.parameters()):
            if not p.requires_grad:
                assert got is None
            else:  # a rank cannot know that nobody uses its output: it gets zeros
                assert_equal_to(got, torch.zeros_like(p) if p.grad is None else p.grad)


class Grumpy(nn.Module):
    """Fails on request."""

    def __init__(self):
        super().__init__()
        self.linear, self.fail = Linear(4, 4, dtype=torch.float64), False
        nn.init.ones_(self.linear.weight)

    def forward(self, x):
        if self.fail:
            raise KeyError("as asked")
        self.saw = weakref.ref(x)
        return self.linear(x)


def _fail_then_go_on(world, batch):
    stages = [Grumpy(), Grumpy()]
    pipeline = Pipeline(stages, world, one_rank_of_two_stages(), loss_fn=mean_square)
    stages[1].fail = True
    with pytest.raises(KeyError):
        pipeline.step(*batch)
    assert stages[0].saw() is None, "the step that failed keeps its activations"
    stages[1].fail = False
    deferred = [stage.linear.deferred for stage in stages]
    pipeline.step(*batch)
    return deferred, [stage.linear.weight.grad for stage in stages]


def one_rank_of_two_stages():
    return minipar.pipeline.breadth_first(1, 2, 2)


def test_a_step_after_one_that_failed_is_as_good_as_any():
    batch = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    ((deferred, got),) = minipar.run(_fail_then_go_on, batch, world_size=1)
    stages = [Grumpy(), Grumpy()]
    for x, target in zip(batch[0].split(2), batch[1].split(2)):
        (mean_square(nn.Sequential(*stages)(x), target) / 2).backward()
    assert deferred == [None, None]
    assert all(torch.equal(g, stage.linear.weight.grad) for g, stage in zip(got, stages))


def test_what_a_stage_asks_of_data_parallelism_is_methods_alone():
    """From Python 3.12 on, isinstance() looks up a protocol's members in the class alone, and no submodule is there.

    A stage asked for `module` too, so pipelines on Python 3.12 did not know DDP, and replicas drifted apart.
    """
    assert "module" not in vars(DDP)
    assert GradientSync.__annotations__ == {}
    assert all(
        inspect.isfunction(vars(wrapper)[name])
        for wrapper in (DDP, FSDP)
        for name in ("no_sync", "synchronize")
    )
