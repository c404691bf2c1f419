"""The executor on real ranks: every schedule trains as one process does, and does what the schedule says."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import minipar
from minipar.data_parallel import DDP
from minipar.data_parallel.fsdp import FSDP
from minipar.mesh import Mesh, placement_of
from minipar.model import IGNORE_INDEX, Block, Transformer
from minipar.pipeline import Pipeline, execute
from minipar.pipeline.stage import Stage
from minipar.pipeline.tied import TiedGradients
from minipar.schedules.gpipe import breadth_first, gpipe
from minipar.schedules.one_f_one_b import interleaved, one_f_one_b
from minipar.schedules.registry import make_schedule
from minipar.schedules.v_shaped import zb_v
from minipar.schedules.validate import validate
from minipar.schedules.zero_bubble import zb_h1
from tests.examples import examples
from tests.pipeline.programs import (
    accumulate,
    assert_gathered,
    assert_same,
    make_batch,
    one_process,
    own_stages,
    small_config,
    together,
    train_step,
)
from tests.pipeline.strategies import mutants, schedules
from tests.schedules.families import WHOLE_SAMPLES
from tests.strategies import assert_equal_to, seeds

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
exact_dtypes = st.sampled_from(list(LIMITS))


@st.composite
def cases(draw, drawn=schedules(WHOLE_SAMPLES, max_ranks=4, max_microbatches=12)):  # noqa: B008
    """A schedule, a model with at least a layer a stage, layer costs that move the cuts, and a batch."""
    schedule = draw(drawn)
    num_layers = schedule.num_stages + draw(st.integers(0, 3))
    costs = draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=num_layers, max_size=num_layers))
    config = small_config(num_layers, dropout=draw(st.sampled_from([0.0, 0.2])))
    batch = make_batch(config, schedule.num_microbatches * draw(st.integers(1, 2)), draw(seeds))
    return schedule, config, costs, batch


def check_bitwise(case, dtype, world_size, steps=2, **options):
    schedule, config, costs, batch = case
    parts = minipar.run(
        lambda world: train_step(world, config, dtype, schedule, batch, steps=steps, costs=costs, **options),
        world_size=world_size,
    )
    loss, got = together(parts)
    want_loss, want = one_process(config, dtype, batch, schedule.num_microbatches, steps=steps)
    assert torch.equal(loss, want_loss)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@given(cases(), exact_dtypes)
def test_every_schedule_trains_bitwise_like_one_process(case, dtype):
    check_bitwise(case, dtype, world_size=4)


@pytest.mark.slow
@examples(60)
@given(cases(schedules(WHOLE_SAMPLES, max_ranks=8, max_microbatches=20)), exact_dtypes)
def test_every_schedule_trains_bit_for_bit_on_more_ranks(case, dtype):
    check_bitwise(case, dtype, world_size=8)


@pytest.mark.nccl(2)
@pytest.mark.parametrize("name", WHOLE_SAMPLES)
def test_the_same_executor_trains_on_nccl(name):
    schedule = make_schedule(name, 2, 4)
    config = small_config(schedule.num_stages, tie_embeddings=True)
    batch = make_batch(config, 4)
    program = (config, torch.float64, schedule, batch)
    loss, got = together(minipar.run(train_step, *program, world_size=2, backend="nccl", timeout_s=30))
    want_loss, want = one_process(config, torch.float64, batch, 4, device="cuda")
    assert_equal_to(loss, want_loss)
    assert_same(got, want)


@examples(8)
@given(cases(), exact_dtypes)
def test_activation_checkpointing_changes_no_bit(case, dtype):
    check_bitwise(case, dtype, world_size=4, checkpoint=True)


@examples(8)
@given(cases(schedules(names=["zb-v"], max_ranks=4, max_microbatches=6)))
def test_some_stages_may_be_checkpointed_and_others_not(case):
    check_bitwise(case, torch.float64, world_size=4, checkpoint={0, 3})


@examples(15)
@example(("zb-v", 1, 2), torch.float64, 1)
@example(("1f1b", 3, 4), torch.float64, 2)  # gradients of an earlier step, at both ends
@given(
    st.tuples(st.sampled_from(WHOLE_SAMPLES), st.integers(1, 4), st.integers(1, 6)),
    exact_dtypes,
    st.integers(1, 2),
)
def test_tied_embeddings_get_the_sum_of_both_ends(sizes, dtype, steps):
    schedule = make_schedule(*sizes)
    config = small_config(schedule.num_stages, tie_embeddings=True)
    batch = make_batch(config, schedule.num_microbatches)
    program = (config, dtype, schedule, batch, 0, steps)
    loss, got = together(minipar.run(train_step, *program, world_size=4))
    want_loss, want = one_process(config, dtype, batch, schedule.num_microbatches, steps=steps)
    if schedule.num_stages > 1:
        assert torch.equal(got["head.weight"], got["embedding.weight"])
        del got["head.weight"]
    assert torch.equal(loss, want_loss)
    assert got.keys() == want.keys()
    assert_same(got, want, LIMITS[dtype])


def _tied_weights(stages) -> list[torch.Tensor]:
    return [
        p for stage in stages for n, p in stage.named_parameters() if n in ("embedding.weight", "head.weight")
    ]


def _with_trained(world, config, schedule, batch, at_first):
    """Gradients of a step before which the tied weight is frozen if it was trained at first, or the other way round."""
    stages = own_stages(Transformer(config, dtype=torch.float64), schedule, world.rank)
    for weight in _tied_weights(stages):
        weight.requires_grad_(at_first)
    pipeline = Pipeline(stages, world, schedule)
    for weight in _tied_weights(stages):
        weight.requires_grad_(not at_first)
    loss = pipeline.step(*batch, stage_kwargs={"step": 3})
    return loss, {name: p.grad for stage in stages for name, p in stage.named_parameters()}


@pytest.mark.parametrize("at_first", [False, True], ids=["thawed later", "frozen later"])
@pytest.mark.parametrize("schedule", [one_f_one_b(2, 3), zb_v(2, 3)], ids=lambda s: s.name)
def test_a_tied_weight_may_be_thawed_or_frozen_between_steps(schedule, at_first):
    config = small_config(schedule.num_stages, tie_embeddings=True)
    batch = make_batch(config, 3)
    _, got = together(minipar.run(_with_trained, config, schedule, batch, at_first, world_size=2))
    _, want = one_process(config, torch.float64, batch, 3)
    if at_first:
        assert got["embedding.weight"] is got["head.weight"] is None
        del want["embedding.weight"]
    else:
        assert torch.equal(got["head.weight"], got["embedding.weight"])
    assert_same(got, want)


def _stopped(world, config, schedule, batch):
    """Whether a step that fails leaves the gradients of a tied weight as they were."""
    stages = own_stages(Transformer(config, dtype=torch.float64), schedule, world.rank)
    pipeline = Pipeline(stages, world, schedule)
    pipeline.step(*batch)
    before = [weight.grad.clone() for weight in _tied_weights(stages)]

    def stop(self, program, run=execute._Step.run):
        run(self, program)
        raise RuntimeError("stopped")

    with mock.patch.object(execute._Step, "run", stop), pytest.raises(RuntimeError, match="stopped"):
        pipeline.step(*batch)
    return [torch.equal(weight.grad, grad) for weight, grad in zip(_tied_weights(stages), before)]


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 2), zb_v(2, 2)], ids=lambda s: s.name)
def test_a_step_that_fails_loses_no_gradient_of_a_tied_weight(schedule):
    config = small_config(schedule.num_stages, tie_embeddings=True)
    alike = minipar.run(_stopped, config, schedule, make_batch(config, 2), world_size=2)
    assert [same for of_rank in alike for same in of_rank] == [True, True]


def _three_steps(world, config, batch):
    """(loss, gradient of a weight, spans) of a plain step, of one with a loss scale, and of one without targets."""
    pipeline = Pipeline([Transformer(config)], world, gpipe(1, 2))
    weight, found = pipeline.stages[0].module.norm.weight, []
    tokens, targets = batch
    no_targets = torch.full_like(targets, IGNORE_INDEX)
    for target, scale in ((targets, 1.0), (targets, 8.0), (no_targets, 1.0)):
        weight.grad = None
        loss = pipeline.step(tokens, target, loss_scale=scale)
        found.append((loss, weight.grad, pipeline.spans))
    return found


def test_each_step_has_its_own_loss_scale_count_and_spans():
    config = small_config(2)
    ((plain, scaled, empty),) = minipar.run(_three_steps, config, make_batch(config, 4), world_size=1)
    assert torch.equal(plain[0], scaled[0])
    assert torch.equal(8 * plain[1], scaled[1])
    assert (empty[0], empty[1].count_nonzero()) == (0, 0)
    assert not any(loss.requires_grad for loss, _, _ in (plain, scaled, empty))
    ends = [max(end for _, end in spans.values()) for _, _, spans in (plain, scaled, empty)]
    assert ends == sorted(set(ends)), "a step changed the spans of the one before"


def _with_fault(world, fault, *program):
    with mock.patch.object(*fault):
        return train_step(world, *program)


def _forget_half(stage, microbatch):
    products = stage._products.pop(microbatch)
    for product in products[microbatch % 2 :]:
        product()
    stage._left -= 1


FAULTS = {
    "each end of a tied model keeps its own gradient": (TiedGradients, "finish", lambda self: None),
    "a weight gradient is put off and forgotten": (Stage, "weight_backward", _forget_half),
    "the loss is not divided": (
        Pipeline,
        "_divisor",
        lambda self, targets, count: torch.ones(()),
    ),
    "samples are numbered within their microbatch": (
        Stage,
        "_sample_ids",
        lambda self, k, x: torch.arange(len(x)),
    ),
    "gradients of the input arrive as zeros": (
        Stage,
        "backward",
        lambda self, k, gradient, run=Stage.backward: run(self, k, 0 * gradient),
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_changes_a_gradient(fault):
    config = small_config(3, tie_embeddings=True, dropout=0.2)
    batch = make_batch(config, 4)
    program = (config, torch.float64, zb_h1(3, 2), batch)
    parts = minipar.run(_with_fault, FAULTS[fault], *program, world_size=3)
    _, got = together(parts)
    _, want = one_process(config, torch.float64, batch, 2)
    with pytest.raises(AssertionError, match="max"):
        assert_same(got, want)


@examples(150)
@given(mutants(schedules(WHOLE_SAMPLES, max_ranks=4, max_microbatches=6)))
def test_a_changed_schedule_is_refused_or_trains_right(schedule):
    """In whatever order it runs the microbatches: so to rounding."""
    try:
        validate(schedule)
    except ValueError:
        return
    config = small_config(schedule.num_stages)
    batch = make_batch(config, schedule.num_microbatches)
    parts = minipar.run(train_step, config, torch.float64, schedule, batch, world_size=4)
    loss, got = together(parts)
    want_loss, want = one_process(config, torch.float64, batch, schedule.num_microbatches)
    assert_equal_to(loss, want_loss)
    assert_same(got, want)


def _optimize(world, config, schedule, batches):
    torch.set_num_threads(1)
    stages = own_stages(Transformer(config, dtype=torch.float64), schedule, world.rank)
    pipeline = Pipeline(stages, world, schedule)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        pipeline.step(*batch)
        optimizer.step()
    return {name: p.detach() for stage in stages for name, p in stage.named_parameters()}


@pytest.mark.parametrize(
    "schedule", [one_f_one_b(3, 4), interleaved(2, 4, 2), zb_v(2, 4)], ids=lambda s: s.name
)
def test_parameters_after_several_steps_are_those_of_one_process(schedule):
    config = small_config(4)
    batches = [make_batch(config, 4, seed) for seed in range(3)]
    model = Transformer(config, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        accumulate(model, *batch, schedule.num_microbatches)
        optimizer.step()
    parts = minipar.run(_optimize, config, schedule, batches, world_size=schedule.num_ranks)
    got = {name: p for part in parts for name, p in part.items()}
    assert [name for name, p in model.named_parameters() if not torch.equal(got[name], p)] == []


WRAPPERS = {
    "ddp": lambda stage, data: DDP(stage, data, reduce="sum"),
    "fsdp": lambda stage, data: FSDP(stage, data, units=Block, shard_rest=False, reduce="sum"),
}


def _replicated(world, config, schedule, batch, wrapper):
    """Two pipelines, each on half of the samples. Gradients as (placement, local part)."""
    torch.set_num_threads(1)
    mesh = Mesh(world, pp=2, dp=2)
    comm, data = mesh.comm("pp"), mesh.comm("dp")
    model = Transformer(config, dtype=torch.float64)
    stages = [WRAPPERS[wrapper](stage, data) for stage in own_stages(model, schedule, comm.rank)]
    syncs = []
    for stage in stages:
        stage.synchronize = lambda run=stage.synchronize: (syncs.append(1), run())
    pipeline = Pipeline(stages, comm, schedule)
    tokens, targets = batch
    ids = torch.arange(len(tokens)).chunk(2)[data.rank]
    options = {
        "count": (targets != IGNORE_INDEX).sum(),
        "per_sample": {"sample_ids": ids},
        "stage_kwargs": {"step": 3},
    }
    loss = pipeline.step(tokens[ids], targets[ids], **options)
    # A last backward that is whole reduces while it runs; after a last W it has to be asked for.
    last = {action.stage: action.op for action in schedule.actions[comm.rank]}
    assert len(syncs) == list(last.values()).count("W")
    return loss, [(placement_of(p), p.grad) for stage in stages for p in stage.parameters()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("schedule", [one_f_one_b(2, 3), zb_h1(2, 3), zb_v(2, 3)], ids=lambda s: s.name)
def test_replicas_of_a_pipeline_sum_their_gradients_once_a_step(schedule, wrapper, tied):
    config = small_config(4, tie_embeddings=tied, dropout=0.2)
    batch = make_batch(config, 6)
    parts = minipar.run(_replicated, config, schedule, batch, wrapper, world_size=4)
    want_loss, want = one_process(config, torch.float64, batch, 3)
    assert_equal_to(sum(loss for loss, _ in parts if loss is not None), want_loss)
    assert_gathered([grads for _, grads in parts], want)


def _frozen_block(world, config, batch):
    model = Transformer(config, dtype=torch.float64)
    model.embedding.requires_grad_(False)
    model.layers["0"].requires_grad_(False)
    (stage,) = own_stages(model, zb_h1(1, 3), 0)
    stage = FSDP(stage, world, units=Block, reduce="sum")
    Pipeline([stage], world.subgroup([world.rank], "pp"), zb_h1(1, 3)).step(*batch, stage_kwargs={"step": 3})
    return [(placement_of(p), p.grad / world.size) for p in stage.parameters() if p.requires_grad]


def test_fsdp_accepts_frozen_blocks_with_deferred_gradients():
    config = small_config(2)
    batch = make_batch(config, 6)
    _, want = one_process(config, torch.float64, batch, 3)
    want = {name: grad for name, grad in want.items() if not name.startswith(("embedding.", "layers.0."))}
    assert_gathered(minipar.run(_frozen_block, config, batch, world_size=2), want)


def _tied_shards(world):
    stages = own_stages(Transformer(small_config(2, tie_embeddings=True)), one_f_one_b(2, 1), world.rank)
    alone = world.subgroup([world.rank], "alone")
    with pytest.raises(
        ValueError, match=r"is a flat shard of 192 elements; keep it whole \(FSDP: shard_rest=False\)"
    ):
        Pipeline([FSDP(stages[0], alone, units=Block)], world, one_f_one_b(2, 1))


def test_a_tied_weight_cut_into_shards_is_refused():
    minipar.run(_tied_shards, world_size=2)


def _traffic(world, config, schedule, batch):
    pipeline = Pipeline(
        own_stages(Transformer(config, dtype=torch.float64), schedule, world.rank), world, schedule
    )
    sent = []
    for _ in range(2):
        world.traffic.reset()
        pipeline.step(*batch)
        sent.append(world.traffic.sent_bytes)
    return sent


@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 2), one_f_one_b(4, 6), interleaved(3, 3, 2), breadth_first(2, 2, 3), zb_v(3, 5)],
    ids=lambda s: s.name,
)
def test_every_boundary_between_ranks_carries_m_outputs_a_direction(schedule):
    """And 80 bytes in the first step. The turn of a V carries nothing, the wrap-around of a loop v-1 times m."""
    config = small_config(schedule.num_stages)
    m = schedule.num_microbatches
    batch = make_batch(config, 2 * m)
    sent = minipar.run(_traffic, config, schedule, batch, world_size=schedule.num_ranks)
    axes_across_nodes = {"gpipe": 2, "1f1b": 3, "interleaved": 5, "breadth-first": 5, "zb-v": 4}[
        schedule.name
    ]
    output_bytes = 2 * config.max_seq_len * config.dim * 8
    steady = 2 * axes_across_nodes * m * output_bytes
    assert [sum(per_rank) for per_rank in zip(*sent)] == [steady + 80 * axes_across_nodes, steady]


def _evaluated(world, config, schedule, batch):
    """The loss of `evaluate`, what it sent, and whether it left the modules as they were."""
    modules = own_stages(Transformer(config, dtype=torch.float64), schedule, world.rank)
    pipeline = Pipeline(modules, world, schedule)
    pipeline.step(*batch, stage_kwargs={"step": 3})  # the first step tells shapes
    frozen = next(iter(modules[0].layers.values())).eval()
    modes = [m.training for module in modules for m in module.modules()]
    before = [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters()]
    world.traffic.reset()
    loss = pipeline.evaluate(*batch, stage_kwargs={"step": 3})
    after = [p.grad for m in modules for p in m.parameters()]
    alike = all(a is b is None or torch.equal(a, b) for a, b in zip(before, after))
    assert not frozen.training
    assert [m.training for module in modules for m in module.modules()] == modes
    return loss, world.traffic.sent_bytes, alike


@pytest.mark.parametrize(
    "schedule", [one_f_one_b(4, 4), interleaved(2, 4, 2), zb_v(2, 4)], ids=lambda s: s.name
)
def test_evaluation_sends_only_forwards_and_applies_no_dropout(schedule):
    config = small_config(4, dropout=0.5, tie_embeddings=True)
    tokens, targets = batch = make_batch(config, 8, 0)
    want = Transformer(config, dtype=torch.float64).eval().loss(tokens, targets, step=3)
    results = minipar.run(_evaluated, config, schedule, batch, world_size=schedule.num_ranks)
    (loss,) = (loss for loss, _, _ in results if loss is not None)
    assert_equal_to(loss, want.detach(), what="loss")
    axes_across_nodes = sum(a != b for a, b in zip(schedule.stage_rank, schedule.stage_rank[1:]))
    assert sum(sent for _, sent, _ in results) == axes_across_nodes * tokens.numel() * config.dim * 8
    assert all(untouched for _, _, untouched in results)
