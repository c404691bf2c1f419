"""ZeRO-3 under a pipeline: a stage's parameters are gathered once per visit, and one stage's are whole at a time."""

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig, schedule_of
from minipar.data_parallel.flat_parameters import FlatParameters
from minipar.mesh import Mesh
from minipar.pipeline.stage import Stage
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from minipar.train.verification.verify import table, verify

MODEL = ModelConfig(dim=16, num_layers=4, num_heads=2, num_kv_heads=1, max_seq_len=8, vocab_size=256)
RUN = TrainConfig(
    model=MODEL, batch_size=8, seq_len=8, steps=2, warmup=1, dtype="float64", trace_steps=0, zero=3, dp=2, pp=2,
    microbatches=4, gather_every="stage",
)  # fmt: skip


def too_early():
    forward = Stage.forward
    return patch.object(Stage, "forward", lambda self, *args: [forward(self, *args), self.reshard()][0])


FAULTS = {
    "none": nullcontext,
    "never resharded": lambda: patch.object(Stage, "reshard", lambda self: None),
    "resharded too early": too_early,
}


def counted(world, config, fault="none"):
    """(bytes sent over dp in a step, most bytes unsharded at once, bytes of each stage, number of trained tensors)"""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    stages = {number: stage.module.flats for number, stage in state.pipeline.stages.items()}
    train_step(
        world, state, config, load_text(None), 0
    )  # in the first step stages tell each other their shapes
    comm, peak, unshard = state.mesh.comm("dp", "cp"), 0, FlatParameters.unshard

    def watched(flat):
        nonlocal peak
        unshard(flat)
        held = [f.full.untyped_storage().nbytes() for flats in stages.values() for f in flats]
        peak = max(peak, sum(held))

    comm.traffic.reset()
    with patch.object(FlatParameters, "unshard", watched), FAULTS[fault]():
        train_step(world, state, config, load_text(None), 1)
    whole = {number: sum(f.full.nbytes for f in flats) for number, flats in stages.items()}
    flags = sum(len(f.params) for flats in stages.values() for f in flats)
    return comm.traffic.sent_bytes, peak, whole, flags


def bytes_of(config, rank, whole, flags):
    """Half of each stage per visit, as much once for its gradients, and flags, an even number of bytes a stage."""
    visits = [visit[0].stage for visit in schedule_of(config).visits(rank)]
    least = sum(whole[stage] for stage in visits) // 2 + sum(whole.values()) // 2 + flags
    return range(least, least + len(whole) + 1)


ORDERS = [*(dict(schedule=name) for name in ("breadth-first", "interleaved", "zb-v", "1f1b")), dict(pp=1)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_stage_is_gathered_once_per_visit_and_held_alone(order):
    config = replace(RUN, **order)
    found = minipar.run(counted, config, world_size=config.world_size)
    for rank, (sent, peak, whole, flags) in enumerate(found):
        assert sent in bytes_of(config, rank // 2, whole, flags)
        assert peak == max(whole.values())


def test_breadth_first_gathers_less_than_a_microbatch_at_a_time():
    """3 visits of 2 stages in place of 2 gathers in each of 4 microbatches."""
    config = replace(RUN, schedule="breadth-first")
    (_, _, whole, _), *_ = once = minipar.run(counted, config, world_size=4)
    every = minipar.run(counted, replace(config, gather_every="microbatch"), world_size=4)
    assert [len(schedule_of(config).visits(rank)) for rank in (0, 1)] == [3, 3]
    for (sent, *_), (more, *_) in zip(once, every):
        assert 3.5 * sent < more + sum(whole.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", list(FAULTS)[1:])
def test_a_planted_fault_is_seen_in_memory_or_bytes(fault):
    config = replace(RUN, schedule="breadth-first")
    for rank, (sent, peak, whole, flags) in enumerate(minipar.run(counted, config, fault, world_size=4)):
        if fault == "never resharded":
            assert peak == sum(whole.values())
        else:
            assert sent > max(bytes_of(config, rank // 2, whole, flags)) + min(whole.values())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "mesh",
    [
        dict(schedule="breadth-first"),
        dict(schedule="interleaved", dtype="bfloat16", recompute="full"),
        dict(schedule="zb-h1", replicate=2, dp=4, microbatches=2),
        dict(model=replace(MODEL, tie_embeddings=True), offload="cpu"),
    ],
    ids=str,
)
def test_a_mesh_that_gathers_stages_gives_the_numbers_of_one_process(mesh):
    result = verify(replace(RUN, steps=3, **mesh))
    assert result.equal, table(result)


def test_gathering_stages_without_zero_3_is_refused():
    with pytest.raises(ValueError, match="gather_every=stage is for zero=3"):
        replace(RUN, zero=2)
