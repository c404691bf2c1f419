"""Small runs whose ranks are counted, and what the planner makes of them."""

from dataclasses import replace

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.cost.layout import Job, Layout
from minipar.cost.machines import MACHINES
from minipar.cost.traffic import step_traffic
from minipar.mesh import Mesh
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.planned import job_and_layout
from minipar.train.step import train_step

SMALL = ModelConfig(dim=64, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=32)
MIXTURE = replace(SMALL, num_experts=4, top_k=2, moe_every=1, shared_dim=16)
LATENT = replace(SMALL, num_kv_heads=4, kv_latent_dim=16, rope_dim=8)
QWEN = replace(SMALL, head_dim=24, qkv_bias=True, qk_norm=True)
PARALLEL = replace(SMALL, parallel_block=True)
RUN = TrainConfig(model=SMALL, batch_size=8, seq_len=32, steps=2, warmup=1, dtype="float64", trace_steps=0)
COMMS = {"tp": ("tp",), "pp": ("pp",), "cp": ("cp",), "ep": ("ep",), "dp": ("dp", "cp"), "edp": ("edp",)}


def job_of(config: TrainConfig) -> tuple[Job, Layout]:
    """The job and the layout that a training configuration describes."""
    return job_and_layout(config, MACHINES["h100"])


def sent(world, config):
    """(pp coordinate, bytes sent in the second step by axis, number of trained tensors)."""
    mesh = Mesh(world, **config.mesh_sizes)
    state = parallelize(config, mesh, world.device)
    text = load_text(None)
    train_step(world, state, config, text, 0)  # in the first step stages tell each other their shapes
    comms = {axis: mesh.comm(*axes) for axis, axes in COMMS.items()}
    for comm in comms.values():
        comm.traffic.reset()
    train_step(world, state, config, text, 1)
    num_tensors = sum(1 for stage in state.stages for _ in stage.parameters())
    return mesh.coordinates.pp, {axis: comm.traffic.sent_bytes for axis, comm in comms.items()}, num_tensors


def assert_sends_what_was_predicted(config: TrainConfig) -> None:
    """Activations to the byte; gradients but for padding (64 bytes a tensor and rank) and flags; the loss to 2 numbers."""
    job, layout = job_of(config)
    for pp, counted, num_tensors in minipar.run(sent, config, world_size=config.world_size):
        predicted = {axis: total for axis, (total, _) in step_traffic(job, layout, pp).items()}
        for axis in ("pp", "cp"):
            assert counted[axis] == predicted[axis], axis
        tokens = layout.microbatches(job) * layout.tokens(job)
        assert 0 <= predicted["tp"] - counted["tp"] <= 16 * tokens or counted["tp"] == predicted["tp"]
        counts = 8 * job.shape.num_experts * 4 * layout.microbatches(job) * layout.ep
        if layout.ep > 1:
            assert 0 <= counted["ep"] - predicted["ep"] <= counts
        padding = 64 * 8 * (num_tensors + 8 * config.world_size) * layout.microbatches(job)
        for axis in ("dp", "edp"):
            if counted[axis] or predicted[axis]:
                assert -1 <= counted[axis] - predicted[axis] <= padding, axis
