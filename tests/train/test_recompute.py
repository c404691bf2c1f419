"""What the backward needs, kept elsewhere: the same numbers, fewer bytes here, and the traffic that costs."""

import gc
from dataclasses import replace

import pytest
import torch

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import VERIFY_DEFAULTS as DEFAULTS
from minipar.data_parallel import FSDP
from minipar.mesh import Mesh
from minipar.model import Block, Transformer
from minipar.tensor_parallel import tensor_parallel
from minipar.train.recompute import _Kept, recompute, relocate_activations
from minipar.train.verification.verify import table, verify

KEPT = dict(recompute="full", partition_activations=True)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "changes",
    [
        dict(tp=2, **KEPT),
        dict(pp=2, tp=4, microbatches=2, schedule="zb-h1", **KEPT),
        dict(dp=2, tp=2, zero=3, offload_activations=True, **KEPT),
        dict(dp=2, zero=3, offload_activations=True),
        dict(dp=2, tp=2, zero=3, offload_activations=True, **KEPT | dict(recompute="every:3")),
        dict(pp=2, microbatches=2, schedule="zb-h1", recompute="every:2"),
        dict(tp=2, sequence_parallel=True, recompute="selective", offload_activations=True),
    ],
    ids=str,
)
def test_recomputing_or_offloading_keeps_one_processs_numbers(changes):
    result = verify(replace(DEFAULTS, steps=2, **changes))
    assert result.equal, table(result)


CONFIG = ModelConfig(dim=32, num_layers=3, num_heads=4, max_seq_len=16)
B, T = 2, 16


def kept_and_sent(world, partition: bool, mode: str):
    """Bytes that a forward's blocks keep elsewhere, and what the backward sends to gather."""
    stage = Transformer(CONFIG)
    tensor_parallel(stage, Mesh(world, tp=world.size).comm("tp"))
    recompute(stage, mode)
    if partition:
        relocate_activations(stage, world)
    tokens = torch.randint(0, 256, (B, T))
    loss = stage.loss(tokens, tokens)
    kept = sum(x.part.nbytes for x in gc.get_objects() if isinstance(x, _Kept))
    world.traffic.reset()
    loss.backward()
    return kept, world.traffic.by_kind.get("all_gather", 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tp", "mode", "num_inputs"), [(2, "full", 3), (4, "full", 3), (2, "every:2", 2)])
def test_partitioned_inputs_are_one_in_tp_and_are_gathered_once(tp, mode, num_inputs):
    inputs = num_inputs * 4 * B * T * CONFIG.dim
    for (_, without), (kept, sent) in zip(
        minipar.run(kept_and_sent, False, mode, world_size=tp),
        minipar.run(kept_and_sent, True, mode, world_size=tp),
    ):
        assert kept == inputs // tp
        assert sent - without == inputs * (tp - 1) // tp


def gathered_under_fsdp(world, mode: str) -> int:
    """Bytes that a rank sends to unshard blocks in a step."""
    stage = Transformer(CONFIG)
    recompute(stage, mode)
    wrapped = FSDP(stage, world, Block, algorithm="ring")
    tokens = torch.randint(0, 256, (B, T))
    world.traffic.reset()
    wrapped(tokens, targets=tokens).backward()
    return world.traffic.by_kind["all_gather"]


def test_fsdp_unshards_the_blocks_of_a_unit_but_its_last_once_more():
    full, in_units = (minipar.run(gathered_under_fsdp, mode, world_size=2)[0] for mode in ("full", "every:2"))
    block = sum(64 * -(-p.numel() // 64) * 4 for p in Transformer(CONFIG).layers["0"].parameters())
    assert in_units - full == block // 2  # of three blocks, only the first is not the last of its unit


def test_an_unknown_mode_is_refused_before_anything_changes():
    stage = Transformer(CONFIG)
    with pytest.raises(
        ValueError,
        match="recompute='ful' is unknown; use none, selective, full or every:N.*did you mean full",
    ):
        recompute(stage, "ful")
    assert all(block.attention.overrides.core is None for block in stage.layers.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(tp=2, partition_activations=True), "use recompute=full"),
        (dict(tp=2, sequence_parallel=True, **KEPT), "use one of the two"),
        (
            dict(recompute="every:0"),
            "recompute='every:0' is unknown; use none.* every:N, with N blocks a unit, 1 or more",
        ),
        (dict(recompute="every:x"), "recompute='every:x' is unknown"),
        (dict(recompute="every:"), "recompute='every:' is unknown"),
        (dict(recompute=2), "recompute=2 is unknown"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(DEFAULTS, **changes)
