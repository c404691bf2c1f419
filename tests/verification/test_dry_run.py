"""A dry run says of every rank what a run would show: each message, each byte held, and whom it would wait for in vain."""

from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

import minipar
from minipar.cli import main
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.data.text import load_text
from minipar.mesh import Mesh
from minipar.support.live_bytes import LiveBytes
from minipar.train import step as step_module
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from minipar.transport.dry import Refused
from minipar.verification.dry_programs import run_ranks
from minipar.verification.dry_report import report, verdict
from minipar.verification.dry_run import dry_run
from minipar.verification.dry_tensors import ASSUMED

TINY = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=16)
DEEP = replace(TINY, num_layers=4)
MIXTURE = replace(TINY, num_layers=1, num_experts=4, top_k=2, moe_every=1)
RUN = TrainConfig(model=TINY, batch_size=4, seq_len=16, steps=2, warmup=1, dtype="float64", trace_steps=0)


# Beside real ranks ----------------------------------------------------------------------------------------------------


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


@pytest.mark.sampled(3)
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


def test_memory_that_a_storage_gives_back_is_not_held():
    """FSDP frees gathered parameters by `resize_`, which no mode of torch's sees."""

    def resizes(world, memory):
        held = [memory.now]
        x = torch.zeros(1000)
        held.append(memory.now)
        x.untyped_storage().resize_(0)
        held.append(memory.now)
        x.untyped_storage().resize_(x.nbytes)
        held.append(memory.now)
        del x
        return [*held, memory.now], memory.peak

    before = torch.UntypedStorage.resize_
    assert run_ranks(1, resizes).results == {0: ([0, 4000, 0, 4000, 0], 4000)}
    assert torch.UntypedStorage.resize_ is before


def test_the_planner_is_right_about_states_and_messages():
    """All exactly, but for what buckets are padded by, the counts of steps, and a few numbers of the loss."""
    dry = dry_run(replace(RUN, pp=2, tp=2, microbatches=2))
    found = {(row.pp, row.what): row for row in dry.compared}
    for pp in (0, 1):
        for what in ("parameters", "sent over pp"):
            assert found[pp, what].found == found[pp, what].planned
        for what in ("gradients", "optimizer state", "sent over tp"):
            assert found[pp, what].found == pytest.approx(found[pp, what].planned, rel=0.02), what
        assert found[pp, "peak"].found < 2 * found[pp, "peak"].planned


# Planted faults -------------------------------------------------------------------------------------------------------


def faults(size, program):
    return run_ranks(size, lambda world, _: program(world)).faults


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


def skips(world):
    if world.rank != 1:
        world.all_reduce(torch.zeros(8))
    world.all_gather(torch.zeros(8))


def stops_early(world):
    world.all_gather(torch.zeros(8))
    if world.rank != 1:
        world.all_reduce(torch.zeros(8))


def other_order(world):
    calls = [lambda: world.all_reduce(torch.zeros(8)), lambda: world.broadcast(torch.zeros(8))]
    for call in calls if world.rank else reversed(calls):
        call()


def other_shape(world):
    world.all_reduce(torch.zeros(16 if world.rank == 2 else 8))


def wrong_peer(world):
    if world.rank == 0:
        world.send(torch.zeros(4), 2)
    if world.rank == 1:
        world.recv((4,), torch.float32, 0)


def wrong_size(world):
    if world.rank == 0:
        world.send(torch.zeros(4), 1)
    if world.rank == 1:
        world.recv((5,), torch.float32, 0)


def in_a_circle(world):
    world.send(torch.zeros(4), (world.rank + 1) % world.size)
    world.recv((4,), torch.float32, (world.rank - 1) % world.size)


def never_received(world):
    if world.rank == 0:
        world.send(torch.zeros(4), 1, async_op=True)


def crossed_groups(world):
    a, b = world.subgroup(range(world.size), "a"), world.subgroup(range(world.size), "b")
    for comm in (a, b) if world.rank else (b, a):
        comm.all_reduce(torch.zeros(8))


def groups_in_another_order(world):
    for name in "ab" if world.rank else "ba":
        world.subgroup(range(world.size), name)


def receives_ahead_on_one_channel(world):
    """Good on gloo. NCCL runs a channel's messages one after another: both would wait in their receive."""
    arriving = world.recv((4,), torch.float32, 1 - world.rank, async_op=True)
    world.send(torch.zeros(4), 1 - world.rank)
    arriving.wait()


def waits_for_a_number_nobody_sends(world):
    if world.rank == 0:
        world.recv((1,), torch.int64, 1)


def raises(world):
    if world.rank == 1:
        raise KeyError("lost")
    world.all_reduce(torch.zeros(8))


@pytest.mark.parametrize(
    ("program", "size", "words"),
    [
        (skips, 4, "collective 1 on comm 'world': rank 1 calls all_gather, and rank 0 calls all_reduce sum of [8]"),
        (stops_early, 4, "collective 2 on comm 'world': rank 1 calls no more, and rank 0 calls all_reduce"),
        (other_order, 4, "collective 1 on comm 'world': rank 0 calls broadcast of [8], and rank 1 calls all_reduce"),
        (other_shape, 4, "rank 2 calls all_reduce sum of [16], and rank 0 calls all_reduce sum of [8]"),
        (wrong_peer, 3, "rank 0 waits to send 16 bytes to rank 2 on comm 'world' (float32, message 0), which has"),
        (wrong_size, 2, "rank 0 sends rank 1 16 bytes on comm 'world' (float32, message 0), and rank 1 receives 20"),
        (in_a_circle, 3, "rank 0 waits to send 16 bytes to rank 1 on comm 'world' (float32, message 0), which is bl"),
        (never_received, 2, "rank 0 sent rank 1 1 message on comm 'world' that was not received"),
        (crossed_groups, 2, "rank 0 waits to send 32 bytes to rank 1 on comm 'world/b'"),
        (groups_in_another_order, 2, "rank 0 and rank 1 make the groups they share in different orders"),
        (receives_ahead_on_one_channel, 2, "with NCCL, rank 0 waits to receive 16 bytes from rank 1"),
        (waits_for_a_number_nobody_sends, 2, "rank 0 asked rank 1 for 1 message on comm 'world' that was not sent"),
        (raises, 3, "rank 1 raises KeyError: 'lost'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_planted_fault_is_named(program, size, words):
    assert faults(size, program)[0].startswith(words) or words in faults(size, program)[0]


def test_what_works_is_not_a_fault():
    def works(world):
        world.all_reduce(torch.zeros(8))
        handle = world.all_reduce(torch.ones(3), async_op=True)
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        world.exchange(torch.zeros(4), right, (4,), torch.float32, left)
        lengths = world.all_gather(torch.tensor([world.rank])).tolist()  # whole numbers are delivered
        world.all_gather(torch.zeros(world.rank), sizes=lengths)
        handle.wait()
        return lengths

    done = run_ranks(3, lambda world, _: works(world))
    assert done.faults == []
    assert done.results == {rank: [0, 1, 2] for rank in range(3)}


# What is assumed, and what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("assumption", ASSUMED, ids=lambda a: f"{a.module}.{a.function}")
def test_what_is_assumed_is_read_where_it_says(assumption):
    source = Path(import_module(assumption.module).__file__).read_text()
    assert f"def {assumption.function}(" in source


def test_balanced_routing_is_said_to_be_assumed():
    model = replace(MIXTURE, num_layers=1, capacity_factor=None)
    dry = dry_run(replace(RUN, dp=2, ep=2, model=model))
    assert "the router sends every expert as many tokens, and drops none" in dry.assumed
    sizes = {m.num_bytes for m in dry.programs[0].messages() if m.label == "all_to_all float64"}
    # 2 samples of 16 tokens, 2 choices each, half of them for the other rank's experts
    assert sizes == {2 * 16 * 2 // 2 * 32 * 8}


def test_a_number_that_only_a_run_has_is_refused():
    with pytest.raises(Refused, match="depends on numbers, and a dry run has none"):
        run_ranks(1, lambda world, _: torch.nonzero(torch.zeros(3)))  # a row for each nonzero number
    config = replace(RUN, model=replace(TINY, num_layers=1))
    with pytest.raises(Refused, match=r"minipar\.train\.step\.evaluate .* decides by numbers"):
        run_ranks(1, lambda world, _: evaluates(world, config))


def evaluates(world, config):
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    step_module.evaluate(world, state, config, load_text(None))


def test_torchs_own_collectives_are_refused():
    with pytest.raises(Refused, match="algorithm=native"):
        dry_run(replace(RUN, dp=2, algorithm="native"))


# The command ----------------------------------------------------------------------------------------------------------

FLAGS = [
    "train",
    "--dp",
    "2",
    "--model.num-layers",
    "1",
    "--model.dim",
    "32",
    "--seq-len",
    "16",
    "--batch-size",
    "4",
]


def test_the_command_reports_and_starts_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main([*FLAGS, "--dry-run", "--memory", "80"])
    said = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    assert "What a rank holds, and sends in a step: ranks parameters gradients states" in said
    assert "dp2 would run: each of" in said
    assert "of 80 GB at the worst moment of a step" in said
    assert list(tmp_path.iterdir()) == []


def test_a_mesh_that_does_not_fit_exits_with_1(capsys):
    with pytest.raises(SystemExit) as left:
        main([*FLAGS, "--dry-run", "--memory", "0.0001"])
    assert left.value.code == 1
    assert "dp2 DOES NOT FIT: ranks 0-1 need up to" in capsys.readouterr().out
