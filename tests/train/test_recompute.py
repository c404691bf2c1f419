"""What the backward needs, kept elsewhere: the same numbers, fewer bytes here, and the traffic that costs."""

import gc
from dataclasses import replace

import pytest
import torch

import minipar
from minipar.mesh import Mesh
from minipar.model import ModelConfig, Transformer
from minipar.tensor_parallel import tensor_parallel
from minipar.train.recompute import _Kept, recompute, relocate_activations
from minipar.train.train_config import VERIFY_DEFAULTS as DEFAULTS
from minipar.train.verification import table, verify

KEPT = dict(recompute="full", partition_activations=True)


@pytest.mark.parametrize(
    "changes",
    [
        dict(tp=2, **KEPT),
        dict(pp=2, tp=4, microbatches=2, schedule="zb-h1", **KEPT),
        dict(dp=2, tp=2, zero=3, offload_activations=True, **KEPT),
        dict(dp=2, zero=3, offload_activations=True),
        dict(tp=2, sequence_parallel=True, recompute="selective", offload_activations=True),
    ],
    ids=str,
)
def test_wherever_activations_wait_the_numbers_are_those_of_one_process(changes):
    result = verify(replace(DEFAULTS, steps=2, **changes))
    assert result.equal, table(result)


CONFIG = ModelConfig(dim=32, num_layers=3, num_heads=4, max_seq_len=16)
B, T = 2, 16


def kept_and_sent(world, partition: bool):
    """Bytes that a forward's blocks keep elsewhere, and what the backward sends to gather."""
    stage = Transformer(CONFIG)
    tensor_parallel(stage, Mesh(world, tp=world.size).comm("tp"))
    recompute(stage, "full")
    if partition:
        relocate_activations(stage, world)
    tokens = torch.randint(0, 256, (B, T))
    loss = stage.loss(tokens, tokens)
    kept = sum(x.part.nbytes for x in gc.get_objects() if isinstance(x, _Kept))
    world.traffic.reset()
    loss.backward()
    return kept, world.traffic.by_kind.get("all_gather", 0)


@pytest.mark.parametrize("tp", [2, 4])
def test_partitioned_inputs_are_one_in_tp_and_are_gathered_once_a_layer(tp):
    inputs = CONFIG.num_layers * 4 * B * T * CONFIG.dim
    for (_, without), (kept, sent) in zip(
        minipar.run(kept_and_sent, False, world_size=tp, timeout_s=10),
        minipar.run(kept_and_sent, True, world_size=tp, timeout_s=10),
    ):
        assert kept == inputs // tp
        assert sent - without == inputs * (tp - 1) // tp


def test_a_mode_that_does_not_exist_is_refused_before_anything_is_changed():
    stage = Transformer(CONFIG)
    with pytest.raises(
        ValueError, match="mode='ful' is unknown; use none, selective or full; did you mean full"
    ):
        recompute(stage, "ful")
    assert all(block.attention.overrides.core is None for block in stage.layers.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(tp=2, partition_activations=True), "use recompute=full"),
        (dict(tp=2, sequence_parallel=True, **KEPT), "use one of the two"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(DEFAULTS, **changes)
