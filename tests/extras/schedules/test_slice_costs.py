"""Samples in slices: the bytes that real ranks keep of them, which of them are alive, and the time of unequal ones."""

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.cost.layout import Implementation, Job, Layout, parse_layout, why_illegal
from minipar.cost.machines import MACHINES
from minipar.cost.memory import rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.models import ModelShape
from minipar.cost.planner import plan, searched
from minipar.cost.report import run_lines
from minipar.cost.stages import least_idle
from minipar.cost.timing import least_seconds, step_parts, step_time
from minipar.extras.schedules.sequence_slices import seq1f1b
from minipar.extras.schedules.slice_costs import (
    key_value_bytes,
    largest_share,
    most_alive,
    sizes_of,
)
from minipar.extras.schedules.sliced_pipeline import SlicedPipeline
from minipar.extras.schedules.slicing import equal_costs, slice_cost, slice_sizes
from minipar.model import Transformer
from minipar.support.live_bytes import LiveBytes
from minipar.train.recompute import recompute
from tests.cost.printed_commands import config_of
from tests.cost.runs import RUN, assert_sends_what_was_predicted
from tests.examples import examples
from tests.pipeline.programs import make_batch, own_stages

H100 = MACHINES["h100"]
schedules = st.builds(seq1f1b, st.integers(2, 5), st.integers(1, 5), st.integers(2, 6))


@given(schedules, st.data())
def test_what_is_alive_is_counted_action_by_action(schedule, data):
    s = schedule.slices
    kept, waiting = (data.draw(st.lists(st.integers(0, 9), min_size=s, max_size=s)) for _ in range(2))
    for rank, actions in enumerate(schedule.actions):
        alive, begun, most = set(), set(), 0
        for op, _, unit in actions:
            sample, n = divmod(unit, s)
            alive ^= {(sample, n)}
            begun |= {sample} if op == "B" else set()
            most = max(most, sum(kept[n] + waiting[n] * (k in begun) for k, n in alive))
        p, m = schedule.num_ranks, schedule.num_microbatches
        assert most_alive(kept, waiting, rank, p, m) == most


def kept_bytes(world, config, schedule, batch, how) -> int:
    """The most bytes that a stage keeps between its actions, without messages and gradients of weights."""
    (part,) = own_stages(Transformer(config, dtype=torch.float32), schedule, world.rank)
    recompute(part, how)
    for parameter in part.parameters():
        parameter.grad = torch.zeros_like(parameter)
    pipeline = SlicedPipeline([part], world, schedule)
    (stage,) = pipeline.stages.values()
    memory, most = LiveBytes(), 0
    gc.freeze()  # so that only what the step leaves is searched for cycles

    def counting(action):
        def run(*args, **kwargs):
            nonlocal most
            with memory:
                result = action(*args, **kwargs)
            result = None if result is None else result.clone()  # what is sent is not the stage's
            gc.collect()
            received = sum(x.nbytes for x, _ in stage._kept.values() if x.is_floating_point())
            most = max(most, memory.now + received)
            return result

        return run

    stage.forward, stage.backward = counting(stage.forward), counting(stage.backward)
    pipeline.step(*batch)
    gc.unfreeze()
    return most


SMALL = ModelConfig(dim=64, num_layers=6, num_heads=4, num_kv_heads=2, max_seq_len=64, vocab_size=8)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("attention", "how", "off"),
    [
        ("flash", "none", 0),
        ("fused", "none", 0),
        ("plain", "none", 0),
        ("flash", "full", 0.01),
        ("flash", "every:2", 0.01),
    ],
)
def test_ranks_keep_the_bytes_of_slices_that_were_predicted(attention, how, off):
    """Exactly; what is computed again also keeps positions and samples' numbers. The last rank has logits besides."""
    config = replace(SMALL, attention=attention)
    m, s, b = 3, 3, 2
    kind = {"plain": "dense"}.get(attention, attention)
    job = Job(
        ModelShape.of(config), H100, 3, 64, m * b, "float32", Implementation(kind, sequence_parallel=False)
    )
    layout = Layout(pp=3, schedule="seq1f1b", slices=s, microbatch=b, recompute=how)
    sizes = sizes_of(job, 1, s)
    program = config, seq1f1b(3, m, s, sizes), make_batch(config, m * b), how
    counted = minipar.run(kept_bytes, *program, world_size=3)
    for rank in (0, 1):
        predicted = rank_memory(job, layout, rank)["activations"]
        assert predicted == pytest.approx(counted[rank], rel=off)
        # Planted faults: microbatches for slices; and slices that do not keep what later ones read.
        whole = rank_memory(job, replace(layout, schedule="1f1b", slices=1), rank)["activations"]
        without = most_alive([n * whole / sum(sizes) for n in sizes], [0] * s, rank, 3, m)
        assert min(abs(wrong / counted[rank] - 1) for wrong in (whole, without)) > 0.03


def test_more_slices_keep_fewer_activations_and_idle_less():
    """(p + s - 1)/s microbatches for p, and idle ranks an s-th: what a long context on deep pipelines is cut for.

    Without latencies, which each slice's messages have anew.
    """
    quick = replace(H100, link_latency_s=0.0, network_latency_s=0.0, start_latency_s=0.0)
    job = Job(MODELS["llama-70b"], quick, 64, 65536, 8)
    layouts = [Layout(pp=8, tp=8, schedule="seq1f1b", slices=s, recompute="full") for s in (2, 4, 8)]
    whole = Layout(pp=8, tp=8, recompute="full")
    kept = [rank_memory(job, a, 0)["activations"] for a in (whole, *layouts)]
    idle = [step_parts(job, a)["idle"] for a in (whole, *layouts)]
    assert kept == sorted(kept, reverse=True)
    shares = [a / idle[0] for a in idle[1:]]
    assert shares == pytest.approx([1 / 2, 1 / 4, 1 / 8], rel=0.07)
    assert all(share > 1 / s for share, s in zip(shares, (2, 4, 8))), "each slice reads the weights again"


def span(schedule, cost) -> float:
    """Seconds of a step where an action's cost depends on its slice."""
    ends, at, free = {}, [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    while any(at[rank] < len(own) for rank, own in enumerate(schedule.actions)):
        for rank, own in enumerate(schedule.actions):
            for action in own[at[rank] :]:
                before = schedule.needs(action)
                if not all(need in ends for need in before):
                    break
                start = max(free[rank], *(ends[need] for need in before)) if before else free[rank]
                ends[action] = free[rank] = start + cost(action)
                at[rank] += 1
    return max(free)


@examples(20)
@given(schedules, st.sampled_from([0, 1, 10]))
def test_ranks_are_idle_for_the_largest_slice(schedule, keys):
    """And a little more, as cuts at 64 places leave slices unequal."""
    s, m, matrices = schedule.slices, schedule.num_microbatches, 10**6
    sizes = equal_costs(512, s, 1000 * keys, matrices, 1)
    costs = [slice_cost(sum(sizes[:n]), t, 1000 * keys, matrices) for n, t in enumerate(sizes)]
    seconds = span(schedule, lambda a: costs[a.microbatch % s] * (1 if a.op == "F" else 2))
    predicted = 3 * (m * sum(costs) + (schedule.num_ranks - 1) * max(costs))
    assert predicted * (1 - 1e-9) <= seconds <= predicted * 1.07


@given(st.integers(0, 9), st.integers(1, 9))
def test_a_token_costs_the_matrices_and_the_keys_up_to_its_own(before, tokens):
    each = [1000 + 2 * 7 * (place + 1) for place in range(before, before + tokens)]
    assert slice_cost(before, tokens, 7, 1000) == sum(each)


def test_ranks_that_share_a_key_head_keep_all_of_it():
    assert [key_value_bytes(ModelShape.of(SMALL), 5, 3, tp, 4) for tp in (1, 2, 4)] == [
        2 * heads * 16 * 5 * 3 * 4 for heads in (2, 1, 1)
    ]


def test_experts_are_given_equal_slices():
    dense, mixture = (Job(MODELS[name], H100, 8, 4096, 8) for name in ("llama-7b", "mixtral-8x7b"))
    assert sizes_of(mixture, 1, 4) == (1024,) * 4
    assert sizes_of(dense, 1, 1) == (4096,)
    sizes = sizes_of(dense, 8, 4)
    assert sum(sizes) == 4096
    assert sorted(sizes, reverse=True) == list(sizes)
    assert not any(size % 8 for size in sizes)
    assert 1 <= largest_share(dense, 8, 4) < 1.05 < largest_share(mixture, 1, 4)


# In a plan ------------------------------------------------------------------------------------------------------------


def test_few_long_samples_are_cut_into_slices():
    """Of one sample a stage has nothing else to do; whole samples are slower by their bubble. Short ones are not cut."""
    machine = replace(H100, memory_bytes=12e9, gpus_per_node=1, card_bytes_per_s=1e9)
    job = Job(ModelShape("tiny", 8, 1024, 8, 2816, 32000, 4), machine, 4, 16384, 1)
    winner = plan(job).best[0]
    assert winner.layout.schedule == "seq1f1b"
    whole = step_time(job, replace(winner.layout, schedule="1f1b", slices=1))
    cut = step_time(job, winner.layout)
    more = {part: whole.parts[part] - cut.parts[part] for part in whole.parts}
    assert more["idle"] == max(more.values()) > 0
    assert "seq1f1b" in searched(job)
    assert "seq1f1b" not in searched(replace(job, seq_len=8192))


def test_the_lower_bound_of_a_step_in_slices_is_one():
    job, layout = (
        Job(MODELS["mixtral-8x7b"], H100, 16, 4096, 64),
        parse_layout("dp2-pp4-tp2-zero1-seq1f1b:8-mb32"),
    )
    idle = least_idle("seq1f1b", 4, layout.microbatches(job), 1, 8)
    assert 0.3 < least_seconds(job, layout) * (1 + idle) / step_time(job, layout).total <= 1


def test_a_layouts_name_says_its_slices():
    layout = Layout(pp=4, dp=2, zero=1, schedule="seq1f1b", slices=8, recompute="full")
    assert parse_layout(layout.name) == layout


def test_no_slices_cannot_be_read():
    with pytest.raises(ValueError, match="sizes begin at 1"):
        parse_layout("pp4-seq1f1b:0")


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("dp2-pp4-seq1f1b:4", None),
        ("pp8-seq1f1b:1", "schedule.slices=1 cuts no sample; use 2 or more, or schedule=1f1b"),
        ("dp8-seq1f1b:2", "schedule=seq1f1b needs pp of 2 or more"),
        ("pp4-cp2-seq1f1b:2", "cp=2 spreads a sample over ranks; use one of the two"),
        ("pp2-tp4-seq1f1b:200", "schedule.slices=200 are more than the 128 parts of seq_len=512"),
    ],
)
def test_what_stands_against_slices(layout, says):
    job = Job(ModelShape("tiny", 8, 1024, 8, 2816, 32000, 4), H100, 8, 512, 16)
    why = why_illegal(job, parse_layout(layout))
    assert why is None if says is None else says in why


@pytest.mark.parametrize(
    ("model", "text"),
    [("llama-7b", "dp2-pp4-seq1f1b:8-zero1"), ("mixtral-8x7b", "ep2-dp2-pp4-seq1f1b:4-zero1")],
)
def test_the_printed_command_cuts_the_slices_of_the_layout(model, text):
    job, layout = Job(MODELS[model], H100, 8, 4096, 32), parse_layout(text)
    config = config_of(run_lines(job, layout)[0])
    assert (config.schedule, config.options["schedule"].slices) == (layout.schedule, layout.slices)
    assert slice_sizes(config) == sizes_of(job, layout.tp, layout.slices)
    assert config.model.attention == job.implementation.attention
    assert (config.microbatches, config.zero) == (layout.microbatches(job), layout.zero)
    assert config.mesh_sizes == {axis: getattr(layout, axis) for axis in ("pp", "dp", "cp", "tp", "ep")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("slices", "mesh"),
    [
        (3, dict(pp=2, microbatches=2)),
        (4, dict(pp=2, tp=2, microbatches=2, sequence_parallel=True)),
        (2, dict(dp=2, pp=2, zero=2, microbatches=2, reduce_every="microbatch")),
    ],
)
def test_ranks_send_what_was_predicted_of_slices(slices, mesh):
    config = replace(RUN, **mesh, bucket_mb=25).choosing(schedule=("seq1f1b", {"slices": slices}))
    assert_sends_what_was_predicted(config)
