"""One rank of each kind says what a dry run of every rank says, and names the faults of a whole kind."""

from dataclasses import replace

import pytest
import torch

from minipar.extras.dry_run.kinds import run_kinds
from minipar.extras.dry_run.record import Refused
from minipar.extras.dry_run.report import report
from minipar.extras.dry_run.run import dry_run
from minipar.mesh import Mesh
from minipar.train import step as step_module
from tests.extras.dry_run.configs import MIXTURE, RUN, TINY

ALIKE = ("dp", "tp")


# Beside a dry run of every rank ---------------------------------------------------------------------------------------


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
    """The same messages and bytes in total; of the ranks that were run, all that is held and sent."""
    config = replace(RUN, **mesh)
    whole, by_kind = dry_run(config), dry_run(config, by_kind=True)
    assert whole.works
    assert by_kind.works
    of = by_kind.by_kind
    assert len(of.kinds) == config.pp * config.cp <= config.world_size // 2
    assert of.messages == whole.num_messages
    sent = [message.num_bytes for program in whole.programs for message in program.messages()]
    assert of.sent_bytes == sum(sent)
    assert by_kind.ranks.keys() == whole.ranks.keys()
    for rank, found in by_kind.ranks.items():
        assert found.coordinates == whole.ranks[rank].coordinates
        assert found.holding[:2] == whole.ranks[rank].holding[:2]
    for rank in (*of.kinds, *of.checked.values()):
        assert by_kind.ranks[rank] == whole.ranks[rank]


@pytest.mark.thorough
def test_where_shards_are_even_every_rank_holds_the_same():
    config = replace(RUN, pp=2, dp=2, tp=2, microbatches=2, model=replace(TINY, tie_embeddings=True))
    assert dry_run(config, by_kind=True).ranks == dry_run(config).ranks


def test_more_ranks_than_a_machine_starts_are_run_by_kind():
    config = replace(RUN, dp=48, tp=2, batch_size=48, model=replace(TINY, num_layers=1))
    dry = dry_run(config, memory_gb=1)
    assert dry.works
    assert dry.by_kind.kinds == {0: list(range(96))}
    said = " ".join(report(dry).split())
    assert "Of 1 kinds of ranks the first was computed (0), and the last compared with it" in said
    assert "By symmetry, 94 others do the same: a fault of a single one of these is not seen" in said
    assert "messages of 96 ranks has its receive" in said


# Faults ---------------------------------------------------------------------------------------------------------------


def found(program, **sizes):
    return run_kinds(Mesh(8, **(sizes or dict(pp=2, dp=4))), ALIKE, lambda world, _: program(world)).faults


def on(world, **sizes):
    mesh = Mesh(world, **(sizes or dict(pp=2, dp=4)))
    return mesh, mesh.coordinates.pp


def skips(world):
    _, pp = on(world)
    if pp == 0:
        world.all_reduce(torch.zeros(8))
    world.all_gather(torch.zeros(8))


def other_shape(world):
    _, pp = on(world)
    world.all_reduce(torch.zeros(16 if pp else 8))


def wrong_peer(world):
    mesh, pp = on(world)
    if pp == 0:
        mesh.comm("pp").send(torch.zeros(4), 1)


def wrong_place(world):
    """The second stage waits for the next rank along dp, and the first one sends to the same."""
    mesh, pp = on(world)
    comm, dp = mesh.comm("pp", "dp"), mesh.coordinates.dp
    if pp == 0:
        comm.send(torch.zeros(4), 4 + dp)
    else:
        comm.recv((4,), torch.float32, (dp + 1) % 4)


def wrong_size(world):
    mesh, pp = on(world)
    if pp == 0:
        mesh.comm("pp").send(torch.zeros(4), 1)
    else:
        mesh.comm("pp").recv((5,), torch.float32, 0)


def in_a_circle(world):
    dp = on(world)[0].comm("dp")
    dp.send(torch.zeros(4), (dp.rank + 1) % dp.size)
    dp.recv((4,), torch.float32, (dp.rank - 1) % dp.size)


def crossed_collectives(world):
    """Each stage is in another group's collective first."""
    mesh, pp = on(world)
    for comm in (mesh.comm("pp"), world) if pp else (world, mesh.comm("pp")):
        comm.all_reduce(torch.zeros(8))


def groups_in_another_order(world):
    _, pp = on(world)
    for name in "ab" if pp else "ba":
        world.subgroup(range(world.size), name)


def raises(world):
    _, pp = on(world)
    if pp:
        raise KeyError("lost")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (skips, "rank 4 calls all_gather, and rank 0 calls all_reduce sum of [8]"),
        (other_shape, "rank 4 calls all_reduce sum of [16], and rank 0 calls all_reduce sum of [8]"),
        (wrong_peer, "rank 0 waits to send 16 bytes to rank 4 on comm 'world/pp'"),
        (wrong_place, "rank 0 waits to send 16 bytes to rank 4 on comm 'world/pp.dp' (float32, message 0)"),
        (wrong_size, "rank 0 sends rank 4 16 bytes on comm 'world/pp' (float32, message 0), and rank 4 receives 20"),
        (in_a_circle, "rank 0 waits to send 16 bytes to rank 0 on comm 'world/dp, 1 places on'"),
        (crossed_collectives, "rank 0 waits to send 0 bytes to rank 4 on comm 'world'"),
        (groups_in_another_order, "rank 0 and rank 4 make the groups they share in different orders"),
        (raises, "rank 4 raises KeyError: 'lost'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_fault_of_a_whole_kind_is_named(program, words):
    assert words in found(program)[0]


def ring_of_exchanges(world):
    dp = on(world)[0].comm("dp")
    for by in (1, 3):
        dp.exchange(torch.zeros(4), (dp.rank + by) % 4, (4,), torch.float32, (dp.rank - by) % 4)
    dp.barrier()


def test_what_works_is_not_a_fault():
    assert found(ring_of_exchanges) == []


def only(rank):
    return lambda world: world.all_reduce(torch.zeros(9 if world.rank == rank else 8))


def test_a_last_rank_that_differs_is_refused():
    with pytest.raises(
        Refused, match=r"ranks 4 and 7 are not of one kind: operation 1 is all_reduce sum of \[8\]"
    ):
        found(lambda world: (on(world), only(7)(world)))


def test_a_rank_between_that_differs_is_not_seen():
    """The limit of symmetry, which the report says."""
    assert found(lambda world: (on(world), only(6)(world))) == []


def test_a_trainer_whose_stage_skips_a_collective_is_found(monkeypatch):
    right = step_module.reduce_loss
    monkeypatch.setattr(
        step_module,
        "reduce_loss",
        lambda world, state, config, loss: (
            torch.zeros(()) if state.mesh.coordinates.pp else right(world, state, config, loss)
        ),
    )
    dry = dry_run(replace(RUN, pp=2, dp=4, microbatches=1), by_kind=True)
    assert "on comm 'world': rank 4 calls no more, and rank 0 calls all_reduce" in dry.faults[0]
    assert "WOULD NOT RUN" in report(dry)


def test_whole_numbers_that_differ_in_a_kind_are_not_known():
    assert found(lambda world: world.all_gather(torch.tensor([3])).tolist()) == []
    with pytest.raises(Refused, match="decides by numbers"):
        found(lambda world: world.all_gather(torch.tensor([world.rank])).tolist())
