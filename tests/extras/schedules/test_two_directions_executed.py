"""Two copies of a model on real ranks: the numbers of one process, summed over both, and the bytes that this takes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.data_parallel import DDP
from minipar.data_parallel.fsdp import FSDP
from minipar.extras.schedules.two_directions import chimera, dualpipe, unfolded
from minipar.mesh import Mesh, placement_of
from minipar.model import Block, Transformer
from minipar.pipeline import Pipeline
from minipar.schedules import Schedule, validate
from tests.examples import examples
from tests.pipeline.programs import (
    accumulate,
    assert_gathered,
    make_batch,
    one_process,
    own_stages,
    small_config,
    train_step,
)
from tests.pipeline.strategies import mutants, schedules
from tests.strategies import assert_equal_to, seeds

vs = schedules(["zb-v", "v-half", "v-min"], max_ranks=2, max_microbatches=4).map(unfolded)
doubled = st.one_of(schedules(["chimera", "dualpipe"], max_ranks=4, max_microbatches=8), vs)


def both_summed(parts):
    """The loss and the gradients, summed over the copies of the model that computed a part of them."""
    sums = defaultdict(float)
    for _, grads in parts:
        for name, grad in grads.items():
            sums[name] = sums[name] + grad
    return sum(loss for loss, _ in parts if loss is not None), dict(sums)


@examples(15)
@given(doubled, st.integers(0, 2), st.sampled_from([0.0, 0.2]), st.booleans(), seeds)
def test_the_copies_compute_one_processs_gradients_between_them(schedule, more, dropout, recompute, seed):
    config = small_config(schedule.model_stages + more, dropout=dropout)
    batch = make_batch(config, 2 * schedule.num_microbatches, seed)
    program = (config, torch.float64, schedule, batch)
    parts = minipar.run(
        lambda world: train_step(world, *program, steps=2, checkpoint=recompute), world_size=4
    )
    loss, got = both_summed(parts)
    want_loss, want = one_process(config, torch.float64, batch, schedule.num_microbatches, steps=2)
    assert_equal_to(loss, want_loss)
    assert got.keys() == want.keys()
    for name in want:
        assert_equal_to(got[name], want[name], what=name)


WRAPPERS = {
    "ddp": lambda stage, comm: DDP(stage, comm, reduce="sum", bucket_mb=1e-4, first_bucket_mb=1e-4),
    "fsdp": lambda stage, comm: FSDP(stage, comm, units=Block, shard_rest=False, reduce="sum"),
}


def _wrapped(world, config, schedule, batch, wrapper, fault=None):
    """The loss, and each parameter's (placement, gradient), of pipelines whose copies sum gradients over `sharing`."""
    torch.set_num_threads(1)
    pp = schedule.num_ranks
    mesh = Mesh(world, pp=pp, dp=world.size // pp, mirrored=True)
    over = mesh.comm("dp") if fault == "each copy keeps its own gradients" else mesh.sharing("dp")
    stages = own_stages(Transformer(config, dtype=torch.float64), schedule, mesh.coordinates.pp)
    modules = [WRAPPERS[wrapper](stage, over) for stage in stages]
    pipeline = Pipeline(modules, mesh.comm("pp"), schedule)
    tokens, targets = batch
    ids = torch.arange(len(tokens)).chunk(mesh.sizes["dp"])[mesh.coordinates.dp]
    loss = pipeline.step(
        tokens[ids], targets[ids], count=(targets != -100).sum(), per_sample={"sample_ids": ids}, stage_kwargs={"step": 3}
    )  # fmt: skip
    return loss, [(placement_of(p), p.grad) for module in modules for p in module.parameters()]


def check_wrapped(schedule, world_size, wrapper, tied=False, fault=None):
    config = small_config(schedule.model_stages + 1, tie_embeddings=tied, dropout=0.2)
    dp = world_size // schedule.num_ranks
    batch = make_batch(config, dp * schedule.num_microbatches)
    parts = minipar.run(_wrapped, config, schedule, batch, wrapper, fault, world_size=world_size)
    want_loss, want = one_process(config, torch.float64, batch, schedule.num_microbatches)
    assert_equal_to(sum(loss for loss, _ in parts if loss is not None), want_loss)
    assert_gathered([grads for _, grads in parts], want)  # each copy's, where both have it: equal bit for bit


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("schedule", "world_size"), [(chimera(2, 4), 2), (chimera(4, 4), 4), (dualpipe(2, 4), 4)]
)
def test_both_copies_have_the_whole_gradient_after_a_sum_over_both(schedule, world_size, wrapper, tied):
    check_wrapped(schedule, world_size, wrapper, tied)


@pytest.mark.slow
@examples(30)
@given(doubled, st.sampled_from(sorted(WRAPPERS)), st.booleans(), st.integers(1, 2))
def test_both_copies_have_the_whole_gradient_on_more_ranks(schedule, wrapper, tied, dp):
    check_wrapped(schedule, dp * schedule.num_ranks, wrapper, tied)


@st.composite
def relabelled(draw) -> Schedule:
    """Two copies after one to three edits: two microbatches change places in what a rank does of one stage."""
    schedule = draw(doubled)
    ranks = [list(actions) for actions in schedule.actions]
    for _ in range(draw(st.integers(1, 3))):
        own = draw(st.sampled_from(ranks))
        i = draw(st.integers(0, len(own) - 1))
        j = draw(st.sampled_from([j for j, action in enumerate(own) if action[:2] == own[i][:2]]))
        own[i], own[j] = own[j], own[i]
    return replace(schedule, actions=tuple(map(tuple, ranks)), name=f"relabelled {schedule.name}")


@pytest.mark.slow
@examples(300)
@given(st.one_of(relabelled(), relabelled(), mutants(doubled)))
def test_a_changed_schedule_of_two_copies_is_refused_or_trains_right(schedule):
    """Under FSDP, where the copies wait for each other at every action."""
    try:
        validate(schedule)
    except ValueError:
        return
    check_wrapped(schedule, schedule.num_ranks, "fsdp")


def test_copies_that_keep_their_own_gradients_are_noticed():
    with pytest.raises(ValueError, match="weight: copies of .* differ"):
        check_wrapped(chimera(4, 4), 4, "ddp", fault="each copy keeps its own gradients")


def _bytes_by_kind(world, config, schedule, batch):
    mesh = Mesh(world, pp=world.size, mirrored=True)
    stages = own_stages(Transformer(config, dtype=torch.float64), schedule, world.rank)
    modules = [DDP(stage, mesh.sharing("dp"), reduce="sum") for stage in stages]
    pipeline = Pipeline(modules, mesh.comm("pp"), schedule)
    pipeline.step(*batch)
    world.traffic.reset()
    pipeline.step(*batch)
    gradients = [64 * sum(-(-p.nbytes // 64) for p in module.parameters()) for module in modules]
    flags = [8 * sum(1 for _ in module.parameters()) for module in modules]
    return world.traffic.sent_bytes, sum(128 * -(-(g + f) // 128) for g, f in zip(gradients, flags))


def test_a_step_sends_an_output_over_each_boundary_and_the_gradients_once_between_each_pair():
    """An all-reduce of two ranks sends each one's bytes once: gradients and flags, rounded up as DDP says."""
    schedule, config = chimera(4, 8), small_config(4)
    batch = make_batch(config, 16)
    parts = minipar.run(_bytes_by_kind, config, schedule, batch, world_size=4)
    output_bytes = 2 * config.max_seq_len * config.dim * 8
    gradients = sum(own for _, own in parts)
    whole = sum(p.nbytes for p in Transformer(config, dtype=torch.float64).parameters())
    assert 2 * whole <= gradients < 2.1 * whole
    assert sum(sent for sent, _ in parts) == 2 * 3 * 8 * output_bytes + gradients


@examples(5)
@given(st.sampled_from([chimera(4, 4), dualpipe(2, 6)]), seeds)
def test_evaluation_is_the_loss_of_one_process_between_them(schedule, seed):
    config = small_config(4)
    batch = make_batch(config, schedule.num_microbatches, seed)
    parts = minipar.run(_evaluate, config, schedule, batch, world_size=schedule.num_ranks)
    with torch.no_grad():
        model = Transformer(config, dtype=torch.float64)
        want = model.loss(*batch)
    assert_equal_to(sum(loss for loss in parts if loss is not None), want)


def _evaluate(world, config, schedule, batch):
    torch.set_num_threads(1)
    stages = own_stages(Transformer(config, dtype=torch.float64), schedule, world.rank)
    return Pipeline(stages, world, schedule).evaluate(*batch)


def _optimize(world, config, schedule, batches):
    torch.set_num_threads(1)
    mesh = Mesh(world, pp=world.size, mirrored=True)
    stages = own_stages(Transformer(config, dtype=torch.float64), schedule, world.rank)
    modules = [DDP(stage, mesh.sharing("dp"), reduce="sum") for stage in stages]
    pipeline = Pipeline(modules, world, schedule)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        pipeline.step(*batch)
        optimizer.step()
    return {placement_of(p).name: p.detach() for module in modules for p in module.parameters()}


def test_the_copies_stay_equal_bit_for_bit_over_steps():
    config, schedule = small_config(4), dualpipe(4, 4)
    batches = [make_batch(config, 4, seed) for seed in range(3)]
    model = Transformer(config, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        accumulate(model, *batch, schedule.num_microbatches)
        optimizer.step()
    parts = minipar.run(_optimize, config, schedule, batches, world_size=4)
    for rank, own in enumerate(parts):
        assert own.keys() == parts[3 - rank].keys()
        for name, p in own.items():
            assert torch.equal(p, parts[3 - rank][name]), name
            assert_equal_to(p, dict(model.named_parameters())[name], what=name)
