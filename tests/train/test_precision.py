"""Mixed precision on any mesh: half precision computes, float32 masters are updated, and one process does the same."""

import math
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.train_config import VERIFY_DEFAULTS as DEFAULTS
from minipar.data_parallel import DynamicLossScaler
from minipar.mesh import Mesh, Placement, set_placement
from minipar.model.moe import moe_layers
from minipar.train.data.text import load_text
from minipar.train.master_weights import MasterWeights
from minipar.train.optim import may_step
from minipar.train.parallelize import parallelize
from minipar.train.reference import ReferenceRun, compare, train_in_one_process
from minipar.train.step import train_step
from minipar.train.verification.verify import table, verify
from tests.examples import examples
from tests.train.verification.test_verify import configs

SHORT = replace(DEFAULTS, steps=3)
UNTIED = replace(DEFAULTS.model, tie_embeddings=False)
EXPERTS = replace(DEFAULTS.model, num_experts=4, top_k=2, group_tokens=4)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("zero", range(4))
def test_half_precision_has_float32_masters_at_every_zero_stage(dtype, zero):
    result = verify(replace(SHORT, pp=2, dp=2, tp=2, microbatches=2, dtype=dtype, zero=zero))
    assert result.equal, table(result)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        dict(dtype="bfloat16", reduce_dtype="bfloat16", dp=4, zero=2),
        dict(dtype="float16", reduce_dtype="float16", dp=2, tp=2),
        dict(dtype="float32", reduce_dtype="bfloat16", dp=2, zero=3),
        dict(dtype="float64", reduce_dtype="float32", dp=2),
        dict(dtype="float16", cp=2, ep=2, zero=3, model=EXPERTS),
        dict(dtype="bfloat16", dp=4, zero=3, replicate=2, optimizer="lamb"),
    ],
    ids=str,
)
def test_other_dtypes_of_the_reduction_and_other_meshes(changes):
    result = verify(replace(SHORT, **changes))
    assert result.equal, table(result)


@examples(4)
@given(configs(), st.sampled_from(["bfloat16", "float16"]))
def test_any_mesh_in_half_precision_is_one_process_in_half_precision(config, dtype):
    result = verify(replace(config, dtype=dtype, steps=2))
    assert result.equal, table(result)


def with_half_precision_masters(state):
    """Weights that are updated in half precision, where small updates are lost."""
    step = state.optimizer.step

    def rounding(**kwargs):
        step(**kwargs)
        for master, _ in state.optimizer.tensors_and_states():
            master.data.copy_(master.data.bfloat16())

    state.optimizer.step = rounding


def not_unscaled(state):
    step = state.optimizer.step
    state.optimizer.step = lambda grad_scale: step(grad_scale=1.0)


def with_one_gradient_twice(state):
    """The gradient of one tensor doubled, on the last rank alone."""
    step = state.pipeline.step

    def twice(**kwargs):
        loss = step(**kwargs)
        if state.mesh.world.rank == state.mesh.world.size - 1:
            state.optimizer.tensors[3].grad.mul_(2)
        return loss

    state.pipeline.step = twice


def with_auxiliary_losses_not_scaled(state):
    step = state.pipeline.step

    def unscaled(**kwargs):
        for stage in state.stages:
            for _, moe in moe_layers(stage):
                moe.loss_scale = 1.0
        return step(**kwargs)

    state.pipeline.step = unscaled


def observe_faulty(fault, world, config, text):
    place = import_module("minipar.train.verification.verify")
    right = place.parallelize

    def broken(*args):
        state = right(*args)
        fault(state)
        return state

    place.parallelize = broken
    try:
        return place._observe_rank(world, config, text)
    finally:
        place.parallelize = right


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (with_half_precision_masters, "weights, step 0"),
        (not_unscaled, "weights, step 0"),
        (with_one_gradient_twice, "gradients, step 0"),
        (with_auxiliary_losses_not_scaled, "gradients, step 0"),
    ],
)
def test_a_planted_fault_is_seen_in_half_precision(monkeypatch, fault, says):
    model = replace(
        EXPERTS if fault is with_auxiliary_losses_not_scaled else DEFAULTS.model, balance_coef=1.0
    )
    config = replace(SHORT, steps=1, dp=2, dtype="float16", optimizer="lamb", model=model)
    place = import_module("minipar.train.verification.verify")
    monkeypatch.setattr(place, "_observe_rank", partial(observe_faulty, fault))
    assert verify(config).first_divergence.what == says


def with_gradients_added_in_their_own_dtype(state):
    wrapped = state.optimizer if hasattr(state.optimizer, "reducer") else state.pipeline.stages[0].module
    for bucket in wrapped.buckets:
        bucket.widen = lambda param: None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", range(3))
def test_adding_microbatches_in_half_precision_is_seen(monkeypatch, zero):
    config = replace(SHORT, steps=1, dtype="bfloat16", microbatches=64, batch_size=64, zero=zero)
    asked_for = verify(replace(config, reduce_dtype="bfloat16"))
    assert asked_for.equal, table(asked_for)
    place = import_module("minipar.train.verification.verify")
    faulty = partial(observe_faulty, with_gradients_added_in_their_own_dtype)
    monkeypatch.setattr(place, "_observe_rank", faulty)
    assert verify(config).first_divergence.what == "gradients, step 0"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", [dict(cp=2, seed=0), dict(tp=2, seed=1), dict(cp=2, tp=2, seed=3)])
def test_products_cut_over_ranks_round_otherwise_and_are_equal(cut):
    result = verify(DEFAULTS.choosing(dtype="bfloat16", **cut))
    assert result.equal, table(result)


def overflowing(world, config):
    """The loss scales and skips of a few steps, by this rank."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    text = load_text(None)
    lines = [train_step(world, state, config, text, step) for step in range(config.steps)]
    return [(line["loss_scale"], line["skipped"]) for line in lines], state.scaler.state_dict()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "ahead"),
    [
        (dict(pp=2, dp=2, microbatches=2), 0),
        (dict(pp=2, dp=2, zero=1), 0),
        # One process rounds the whole batch's gradient to float16. These meshes keep the float32 sum of two and of four
        # parts, which need one halving less, and two.
        (dict(dp=2, zero=3), 1),
        (dict(pp=2, dp=2, microbatches=2, zero=1), 2),
    ],
    ids=str,
)
def test_overflows_halve_the_scale_everywhere_as_in_one_process(mesh, ahead):
    config = replace(SHORT, dtype="float16", loss_scale=2.0**30, steps=20, **mesh)
    (lines, scaler), *others = minipar.run(overflowing, config, world_size=mesh.get("pp", 1) * mesh["dp"])
    assert all(other == (lines, scaler) for other in others)
    scales, skipped = zip(*lines)
    first = skipped.index(0)
    # Hysteresis: the first overflow changes nothing.
    assert scales[: first + 1] == tuple(2.0**30 / 2 ** max(0, k - 1) for k in range(first + 1))
    assert 4 < first < 20
    assert scaler["scale"] == 2.0**30 / 2 ** (scaler["overflows"] - 1)
    assert scaler["overflows"] == sum(skipped)
    reference = train_in_one_process(config, load_text(None), 20)
    overflows = [int(not math.isfinite(norm)) for norm in reference.grad_norms]
    if ahead:
        assert overflows[: first + ahead + 1] == [1] * (first + ahead) + [0]
    else:
        assert overflows == list(skipped)


def test_a_run_that_overflows_is_verified_too():
    result = verify(replace(SHORT, dp=2, dtype="float16", loss_scale=2.0**30, steps=4))
    assert result.equal, table(result)
    assert any(row.what == "overflow, step 0" for row in result.rows)


def test_a_master_weight_without_a_gradient_is_not_updated():
    used, unused = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    for weight in (used, unused):
        set_placement(weight, Placement.whole("w", weight.shape))
    optimizer = MasterWeights([{"params": [used, unused]}], torch.optim.SGD, lr=0.5)
    (used.sum() + unused.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    used.sum().backward()
    optimizer.step()
    assert (used.tolist(), unused.tolist()) == ([0.0, 0.0], [0.5, 0.5])


def test_the_scalers_state_goes_on_where_it_was():
    one, other = (DynamicLossScaler(None, initial=64.0, interval=3, hysteresis=2) for _ in range(2))
    for good in (True, False, True, True):
        one.update(good)
    other.load_state_dict(one.state_dict())
    scales = []
    for good in (False, True, True, True, False, False):
        one.update(good)
        other.update(good)
        scales.append((one.current_scale, other.current_scale))
    assert [a for a, _ in scales] == [b for _, b in scales] == [32.0, 32.0, 32.0, 64.0, 64.0, 32.0]


def test_non_finite_steps_stop_or_skip_unless_rescaling_may_help():
    config = replace(SHORT, dtype="float16")
    scaler = DynamicLossScaler(None, initial=4.0)
    assert [may_step(config, 0, 1.0, math.inf, scaler) for _ in range(2)] == [False, False]
    assert scaler.current_scale == 1
    for loss, norm in ((1.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ArithmeticError, match="step 7: the loss is"):
            may_step(config, 7, loss, norm, scaler)
        assert not may_step(replace(config, on_nan="skip"), 7, loss, norm, None)
    with pytest.raises(ArithmeticError, match="the loss is nan"):  # no smaller scale mends a loss
        may_step(config, 7, math.nan, math.inf, DynamicLossScaler(None, initial=4.0))


def test_only_an_overflow_lowers_the_scale_and_none_below_1():
    """After a loss that is nan, which no scale mends, all gradients could underflow for the rest of a run."""
    config, scaler = replace(SHORT, dtype="float16", on_nan="skip"), DynamicLossScaler(None, initial=4.0)
    for norm in (1.0, math.inf, math.nan):
        assert not any(may_step(config, 0, math.nan, norm, scaler) for _ in range(5))
    assert scaler.current_scale == 4
    assert not any(may_step(config, 0, 1.0, math.inf, scaler) for _ in range(20))
    assert scaler.current_scale == 1


def test_one_process_skips_steps_that_are_not_finite(monkeypatch):
    place = import_module("minipar.train.reference")
    plain = place.batch_of
    config = replace(SHORT, lr=1e200, steps=3, warmup=0)
    with pytest.raises(ArithmeticError, match="on_nan=skip"):
        train_in_one_process(config, load_text(None), 3)
    assert plain is place.batch_of
    skipping = train_in_one_process(replace(config, on_nan="skip"), load_text(None), 3)
    assert math.isfinite(skipping.losses[0])
    assert not math.isfinite(skipping.grad_norms[1])
    assert all(x.isfinite().all() for x in skipping.parameters.values())


def test_differences_hide_neither_nan_nor_divide_by_zero():
    def run(loss, norm, weight):
        return ReferenceRun([1.0, loss], [0.0, norm], {"a": torch.zeros(2), "b": torch.tensor([weight, 0.0])})

    same = compare(run(1.0, 0.0, 1.0), run(1.0, 0.0, 1.0))
    assert same[1:4] == (0, 0, 0)
    for wrong in ((math.nan, 0.0, 1.0), (1.0, math.nan, 1.0), (1.0, 0.0, math.nan)):
        assert math.inf in compare(run(*wrong), run(1.0, 0.0, 1.0))[1:4]
    assert compare(run(1.0, 3.0, 1.0), run(1.0, 0.0, 1.0)).grad_norm == 3
    assert compare(run(1.0, math.inf, 1.0), run(1.0, math.inf, 1.0)).grad_norm == 0


def sent_and_grads(world, config):
    """Bytes of gradients that this rank sends in a step, and elements of the model."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    world.traffic.reset()
    train_step(world, state, config, load_text(None), 0)
    elements = sum(len(bucket.flat) for bucket in state.optimizer.buckets)
    return (
        world.traffic.by_kind["reduce_scatter"],
        elements,
        sum(bucket.flat.untyped_storage().nbytes() for bucket in state.optimizer.buckets),
    )


@pytest.mark.thorough
def test_zero_2_reduces_once_a_step_or_after_every_microbatch():
    config = replace(SHORT, dp=2, zero=2, microbatches=4, algorithm="ring")
    for policy, times in (("step", 1), ("microbatch", 4)):
        chosen = replace(config, reduce_every=policy)
        for sent, elements, left in minipar.run(sent_and_grads, chosen, world_size=2):
            assert sent == times * elements * 8 // 2
            assert left == 0
        assert verify(chosen).equal
    assert verify(replace(config, pp=2, reduce_every="microbatch", model=UNTIED)).equal


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(reduce_every="microbatch"), "is for zero=2, and zero=0"),
        (dict(zero=2, schedule="zb-h1", reduce_every="microbatch"), "computes weight gradients apart"),
        (dict(zero=2, pp=2, reduce_every="microbatch"), "sums tied embeddings at the end of a step"),
        (dict(zero=2, pp=2, model=UNTIED, schedule="interleaved", microbatches=2, reduce_every="microbatch"),
         "has several stages on a rank"),
        (dict(reduce_dtype="float16"), "reduce_dtype=float16 overflows without a loss scale"),
        (dict(loss_scale=1024.0), "loss_scale=1024 is used with float16 alone, and dtype is float64; leave it out"),
        (dict(loss_scale=0.0), "loss_scale=0.0 is out of range"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_a_rank_starts(wrong, says):
    with pytest.raises(ValueError, match=says):
        replace(DEFAULTS, **wrong)
