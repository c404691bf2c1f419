"""What a whole step sends is the sum of its parts, each by the formula of whoever sends it."""

from dataclasses import replace

import pytest

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.data_parallel import DDP
from minipar.data_parallel.buckets import flat_bytes
from minipar.mesh import Mesh
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step

MODEL = ModelConfig(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=32)
BASE = TrainConfig(model=MODEL, batch_size=8, seq_len=32, steps=4, warmup=1, dtype="float64", trace_steps=0)
E8 = 8  # bytes an element, in float64


def sent(world, config):
    """(coordinates, bytes sent in a step by axis, all bytes, bytes of DDP's flat buffers)"""
    mesh = Mesh(world, **config.mesh_sizes)
    state = parallelize(config, mesh, world.device)
    text = load_text(None)
    train_step(world, state, config, text, 0)  # in the first step stages tell each other their shapes
    comms = {axes: mesh.comm(*axes) for axes in (("tp",), ("pp",), ("dp", "cp"), ("cp",))}
    for comm in (world, *comms.values()):
        comm.traffic.reset()
    train_step(world, state, config, text, 1)
    by_axes = {axes: comm.traffic.sent_bytes for axes, comm in comms.items() if comm.size > 1}
    flats = [
        flat_bytes(bucket.params, bucket.comm.size, len(bucket.flagged))
        for stage in state.pipeline.stages.values()
        if isinstance(stage.module, DDP)
        for bucket in stage.module.buckets
    ]
    return mesh.coordinates, by_axes, world.traffic.sent_bytes, sum(flats)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "mesh",
    [  # among two ranks every algorithm that "auto" may take sends the same
        dict(dp=2, tp=2, pp=2, microbatches=4),
        dict(pp=4, dp=2, microbatches=2),
        dict(pp=4, tp=2, microbatches=2),
        dict(dp=2, tp=2),
    ],
    ids=str,
)
def test_a_step_sends_the_sum_of_its_parts_and_nothing_else(mesh):
    config = replace(BASE, **mesh)
    pp, dp, tp = config.pp, config.dp, config.tp
    tokens = config.batch_size * config.seq_len // dp  # of this state of the model
    hidden = tokens * MODEL.dim * E8
    for at, by_axes, total, flat in minipar.run(sent, config, world_size=config.world_size):
        first, last = at.pp == 0, at.pp == pp - 1
        # gpt: 4 all-reduces a layer and one each for embedding and head, of 2(t-1)/t of the hidden states.
        sums = 4 * MODEL.num_layers // pp + first + last
        want = {("tp",): sums * 2 * hidden * (tp - 1) // tp} if tp > 1 else {}
        if tp > 1 and last:  # the loss: maximum, sum of exponentials and target's logit of each token
            want["tp",] += by_axes["tp",] - want["tp",]
            assert 0 < by_axes["tp",] - sums * 2 * hidden * (tp - 1) // tp <= 4 * 2 * tokens * E8
        if pp > 1:
            want["pp",] = (int(not last) + int(not first)) * hidden  # activations on, gradients back
        if dp > 1:
            want["dp", "cp"] = 2 * flat * (dp - 1) // dp
        assert {axes: by_axes[axes] for axes in want} == want
        numbers = total - sum(want.values())  # the loss and the norm, over all ranks
        assert 0 < numbers <= 2 * 2 * 8 * config.world_size
