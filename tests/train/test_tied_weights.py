"""The embedding and its copy on the last stage stay one weight, bit for bit, however gradients are summed and cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh, placement_of
from minipar.train.data.text import load_data
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step

MODEL = ModelConfig(dim=16, num_layers=4, num_heads=2, num_kv_heads=2, max_seq_len=16, tie_embeddings=True)
BASE = TrainConfig(model=MODEL, pp=2, dp=3, microbatches=2, batch_size=12, seq_len=16, steps=3, warmup=0)
CHOSEN = {
    "whole gradients": dict(),
    "cut states": dict(zero=1),
    "cut gradients": dict(zero=2, algorithm="ring"),
    "whole matrices of ranks": dict(zero=1, optimizer="muon"),
    "norms of layers": dict(zero=1, optimizer="lamb", dtype="bfloat16"),
    "sums in half precision": dict(zero=2, dtype="bfloat16", reduce_dtype="bfloat16"),
    "bytes in place of gradients": dict(zero=1, compress="int8"),
    "thin factors in place of gradients": dict(zero=1, compress="powersgd"),
    "blocks that are cut, and ends that are whole": dict(zero=3),
    "both ends on a rank, whole matrices of ranks": dict(schedule="dualpipe-v", zero=2, optimizer="muon"),
}  # fmt: skip


def _ends(world, config, text) -> list[torch.Tensor]:
    """This rank's embedding and its copies, after the steps."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    for step in range(config.steps):
        train_step(world, state, config, text, step)
    named = [p for stage in state.stages for p in stage.parameters()]
    return [
        p.detach() for p in named if "embedding.weight" in (placement_of(p).name, placement_of(p).tied_to)
    ]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_a_tied_weight_and_its_copies_stay_equal_bit_for_bit(chosen):
    config = replace(BASE, **CHOSEN[chosen])
    text, _ = load_data(config)
    seen = minipar.run(_ends, config, text, world_size=config.world_size)
    first, *others = [x for ends in seen for x in ends]
    assert len(others) == config.world_size - 1
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
