"""A dry run says of every rank what a run would show: each message, each byte held."""

from collections import defaultdict
from dataclasses import replace

import pytest

import minipar
from minipar.config.model_config import ModelConfig
from minipar.cost.machines import MACHINES
from minipar.cost.memory import rank_memory
from minipar.cost.traffic import step_traffic
from minipar.extras.dry_run.report import report, verdict
from minipar.extras.dry_run.run import dry_run
from minipar.mesh import Mesh
from minipar.support.live_bytes import LiveBytes
from minipar.train import step as step_module
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.planned import job_and_layout
from minipar.train.step import train_step
from tests.extras.dry_run.configs import DEEP, MIXTURE, RUN, TINY


def observed(world, config):
    """What a real rank sends in two steps, by channel and in order; and the bytes alive after them, and at most."""
    sent, transport = defaultdict(list), world._transport
    note = transport.note

    def noted(channel, verb, num_bytes, peer, label):
        message = note(channel, verb, num_bytes, peer, label)
        if verb == "send":
            sent[tuple(channel.key), message.lane].append((message.peer, num_bytes, label))
        return message

    transport.note = noted
    with LiveBytes() as memory:
        state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
        train_step(world, state, config, load_text(None), 0)
        memory.peak = memory.now
        train_step(world, state, config, load_text(None), 1)
    transport.drain()
    return dict(sent), memory.now, memory.peak, len(state.optimizer.tensors)


def recorded(program):
    sent = defaultdict(list)
    for message in program.messages():
        sent[tuple(message.channel), message.lane].append((message.peer, message.num_bytes, message.label))
    return dict(sent)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "mesh",
    [
        dict(dp=2),
        dict(pp=2, tp=2, sequence_parallel=True),
        dict(dp=2, zero=1, dtype="bfloat16"),
        dict(dp=2, zero=2, microbatches=2),
        dict(dp=2, zero=3),
        dict(cp=2, zero=3, dtype="bfloat16"),
        dict(cp=2, cp_attention="ulysses", recompute="full"),
        dict(tp=2, recompute="full", partition_activations=True),
        dict(pp=2, microbatches=2, schedule="interleaved", model=DEEP),
        dict(dp=2, ep=2, model=MIXTURE),
        dict(pp=2, microbatches=4, schedule="zb-v", model=DEEP),
        dict(dp=4, zero=3, replicate=2),
        dict(cp=4, cp_attention="usp", cp_ulysses=2, model=replace(TINY, num_kv_heads=4)),
        dict(pp=2, dp=2, microbatches=2, model=replace(TINY, tie_embeddings=True)),
    ],
    ids=lambda mesh: str({k: v for k, v in mesh.items() if k != "model"}),
)  # fmt: skip
def test_a_dry_run_sends_the_messages_of_a_run(mesh):
    """Every rank, every channel: the same peers, bytes and operations, in the same order."""
    config = replace(RUN, **mesh)
    dry = dry_run(config)
    assert dry.works, dry.faults
    real = minipar.run(observed, config, world_size=config.world_size)
    for program, (sent, *_) in zip(dry.programs, real):
        assert recorded(program) == sent
        assert sum(map(len, sent.values())) > 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [dict(), dict(recompute="full"), dict(dtype="bfloat16")], ids=str)
def test_a_dry_run_holds_the_bytes_of_a_run(mesh):
    """To the byte, but for the optimizer's counts of steps, which only the dry run counts: 4 bytes a tensor."""
    config = replace(RUN, **mesh)
    held = dry_run(config).ranks[0].holding
    (_, now, peak, num_tensors), = minipar.run(observed, config, world_size=1)  # fmt: skip
    assert held.parameters + held.gradients + held.states + held.rest == now + 4 * num_tensors
    assert held.peak == peak + 4 * num_tensors


def test_no_number_is_in_memory():
    """40 GB of parameters and states are described without being allocated."""
    large = ModelConfig(dim=8192, num_layers=3, num_heads=64, hidden_dim=28672, max_seq_len=16)
    dry = dry_run(replace(RUN, model=large, dtype="float32"), memory_gb=30)
    assert dry.ranks[0].holding.peak > 40e9
    assert "DOES NOT FIT" in verdict(dry)
    assert not dry.works


def beside_the_planner(config) -> dict:
    """(pp, what) -> the planner's figure and that of a dry run, of the first rank of each pp coordinate."""
    job, layout = job_and_layout(config, MACHINES["h100"])
    dry, found = dry_run(config), {}
    for pp in range(config.pp):
        rank = next(rank for rank in dry.ranks.values() if rank.coordinates.pp == pp)
        planned = rank_memory(job, layout, pp)
        found[pp, "peak"] = sum(planned.values()) - planned["context"], rank.holding.peak
        for what, held in zip(("parameters", "gradients", "optimizer state"), rank.holding):
            found[pp, what] = planned[what], held
        for axis, sent in step_traffic(job, layout, pp).items():
            found[pp, f"sent over {axis}"] = sent.total, rank.sent[axis]
    return found


def test_the_planner_is_right_about_states_and_messages():
    """All exactly, but for what buckets are padded by, the counts of steps, and a few numbers of the loss."""
    for (_, what), (planned, found) in beside_the_planner(replace(RUN, pp=2, tp=2, microbatches=2)).items():
        if what == "peak":
            assert found < 2 * planned
        else:
            within = 0 if what in ("parameters", "sent over pp") else 0.02
            assert found == pytest.approx(planned, rel=within, abs=0), what


WIDE = replace(DEEP, dim=512, num_heads=8, hidden_dim=1408, vocab_size=8192, max_seq_len=512)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(recompute="selective"),
        dict(recompute="full"),
        dict(model=replace(WIDE, num_experts=4, top_k=2, moe_every=1, capacity_factor=None)),
        dict(model=replace(WIDE, num_kv_heads=8, kv_latent_dim=128, rope_dim=16)),
        dict(model=replace(WIDE, head_dim=96, qkv_bias=True, qk_norm=True)),
    ],
    ids=["plain", "selective", "full", "mixture", "latent", "qwen"],
)
def test_the_planner_and_a_dry_run_give_the_same_peak(changes, dtype):
    """With a vocabulary so large that the peak is in the loss, where no gradient of a layer is alive yet."""
    config = replace(RUN, **dict(model=WIDE, batch_size=4, seq_len=512, dtype=dtype) | changes)
    planned, found = beside_the_planner(config)[0, "peak"]
    assert found == pytest.approx(planned, rel=0.002)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "mesh",
    [
        dict(pp=2, dp=2, tp=2, microbatches=2),
        dict(dp=4, tp=2, zero=3),
        dict(dp=4, ep=2, tp=2, model=MIXTURE),
        dict(cp=2, dp=2, tp=2, zero=1, dtype="bfloat16"),
        dict(dp=4, tp=2, zero=3, replicate=2, sequence_parallel=True, tp_chunked=True),
        dict(cp=4, dp=2, cp_attention="usp", cp_ulysses=2, model=replace(TINY, num_kv_heads=4)),
        dict(pp=2, dp=4, tp=2, microbatches=2, zero=2, batch_size=16),
    ],
    ids=lambda mesh: str({k: v for k, v in mesh.items() if k != "model"}),
)
def test_one_rank_of_each_kind_says_what_all_ranks_say(mesh):
    """Of the ranks that were run, all that is held and sent; of the others, parameters and gradients."""
    config = replace(RUN, **mesh)
    whole, by_kind = dry_run(config), dry_run(config, by_kind=True)
    assert whole.works
    assert by_kind.works
    computed = [program.rank for program in by_kind.programs]
    assert len(computed) == config.pp * config.cp <= config.world_size // 2
    assert by_kind.ranks.keys() == whole.ranks.keys()
    for rank, found in by_kind.ranks.items():
        assert found.coordinates == whole.ranks[rank].coordinates
        assert found.holding[:2] == whole.ranks[rank].holding[:2]
    for rank in computed:
        assert by_kind.ranks[rank] == whole.ranks[rank]


def test_more_ranks_than_a_machine_starts_are_run_by_kind():
    config = replace(RUN, dp=48, tp=2, batch_size=48, model=replace(TINY, num_layers=1))
    dry = dry_run(config, memory_gb=1)
    assert dry.works
    assert dry.ranks.keys() == set(range(96))
    said = " ".join(report(dry).split())
    assert "Of 1 kinds of ranks the first was computed (0). The 95 others are taken to be like it" in said
    assert "one rank was computed, so there are no messages to match" in said


def test_a_trainer_whose_rank_skips_a_collective_is_found(monkeypatch):
    right = step_module.reduce_loss
    monkeypatch.setattr(
        step_module,
        "reduce_loss",
        lambda world, state, config, loss: loss if world.rank == 1 else right(world, state, config, loss),
    )
    dry = dry_run(replace(RUN, dp=2, model=replace(TINY, num_layers=1)))
    assert not dry.works
    assert dry.faults[0].startswith(
        "collective 5 on comm 'world': rank 1 calls no more, and rank 0 calls all_reduce"
    )
    assert "WOULD NOT RUN" in report(dry)
