"""Every option of a strategy reaches it, and a mesh with it gives the numbers of one process."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import minipar
from minipar.comm.collectives import ALGORITHMS, algorithms_of
from minipar.config.choices import ALGORITHMS as ALGORITHM_NAMES
from minipar.config.train_config import VERIFY_DEFAULTS as DEFAULTS
from minipar.context.usp import usp_attention
from minipar.extras.optimizers.families import lamb_over
from minipar.extras.optimizers.lamb import Lamb
from minipar.mesh import Mesh, Placement, set_placement
from minipar.train.optim import AdamW
from minipar.train.parallelize import optimizer_over, parallelize
from minipar.train.verification.verify import table, verify
from tests.strategies import assert_equal_to


def dtypes_of_buffers(world, config):
    (stage,) = parallelize(config, Mesh(world), world.device).stages
    return {name: (b.dtype, b.device.type) for name, b in stage.named_buffers() if "balance_bias" in name}


def test_balance_biases_are_not_cast_with_the_weights():
    model = replace(DEFAULTS.model, num_experts=4, top_k=2, group_tokens=4, balance_bias=True)
    for zero in (0, 3):
        config = replace(DEFAULTS, dtype="float64", zero=zero, model=model)
        (found,) = minipar.run(dtypes_of_buffers, config, world_size=1)
        assert set(found.values()) == {(torch.float32, "cpu")}


EXPERTS = replace(DEFAULTS.model, num_experts=4, top_k=2, group_tokens=4)
PARALLEL = replace(DEFAULTS.model, parallel_block=True)
CASES = {
    "algorithm": dict(pp=2, dp=2, tp=2, microbatches=2, zero=3, algorithm="native"),
    "hybrid sharding": dict(dp=4, zero=3, replicate=2),
    "hybrid sharding of experts": dict(dp=4, ep=2, zero=3, replicate=2, model=EXPERTS),
    "usp": dict(cp=4, cp_attention="usp", cp_ulysses=2),
    "chunks": dict(pp=2, tp=2, sequence_parallel=True, tp_chunked=True, microbatches=2, schedule="zb-h1"),
    "two levels": dict(dp=4, ep=4, dispatch=("chunks", {"node_size": 2, "chunks": 2}), model=EXPERTS),
    "shadowed experts": dict(
        pp=2, dp=2, ep=2, microbatches=2, zero=3, schedule="zb-h1", dispatch="shadow", model=EXPERTS
    ),
    "padded vocabulary": dict(tp=2, pad_vocab=True, model=replace(DEFAULTS.model, vocab_size=257)),
    "parallel block": dict(dp=2, tp=2, zero=3, sequence_parallel=True, model=PARALLEL),
    "parallel block in stages": dict(
        pp=2, tp=2, microbatches=2, schedule="zb-h1", recompute="full", model=PARALLEL
    ),
    "lamb": dict(pp=2, dp=2, tp=2, microbatches=2, optimizer="lamb"),
    "lamb of experts": dict(dp=4, ep=2, tp=2, zero=1, optimizer="lamb", model=EXPERTS),
    "lamb of shards": dict(dp=4, zero=3, replicate=2, optimizer="lamb"),
}


@pytest.mark.sampled(17)
@pytest.mark.parametrize("name", CASES)
def test_a_mesh_with_the_option_gives_the_numbers_of_one_process(name):
    result = verify(DEFAULTS.choosing(steps=3, **CASES[name]))
    assert result.equal, table(result)


def of_rank(world, config):
    """What the strategies of this rank were given."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    (stage, *_), (wrapped, *_) = state.stages, [s.module for s in state.pipeline.stages.values()]
    block = next(iter(stage.layers.values()))
    core = block.attention.overrides.core
    flats = getattr(wrapped, "flats", [])
    return dict(
        algorithms={state.mesh.comm(*axes).default_algorithm for axes in (("dp", "cp"), ("tp",), ("pp",))},
        shards={comm.ranks for flat in flats for comm in (flat.comm, *flat.replicas) if comm is not None},
        usp=[c.ranks for c in core.args] if core is not None and core.func is usp_attention else None,
        chunked=getattr(block.attention.o, "chunked", None),
        levels=[
            (m.overrides.dispatch.route.node_size, getattr(m.overrides.dispatch, "chunks", 1))
            for m in stage.modules()
            if hasattr(m, "load_since_update") and m.overrides.dispatch
        ],
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "what", "want"),
    [
        ("algorithm", "algorithms", {"native"}),
        ("hybrid sharding", "shards", {(0, 1), (0, 2)}),
        ("hybrid sharding of experts", "shards", {(0, 1), (0, 2), (0,)}),
        ("usp", "usp", [(0, 2), (0, 1)]),
        ("chunks", "chunked", True),
        ("two levels", "levels", [(2, 2), (2, 2)]),
    ],
)
def test_the_option_reaches_its_strategy(name, what, want):
    config = DEFAULTS.choosing(**CASES[name])
    assert minipar.run(of_rank, config, world_size=config.world_size)[0][what] == want


def test_every_algorithm_of_a_collective_can_be_chosen():
    # pairwise is the only hand-written all-to-all: "auto" takes it
    names = {name for collective in ALGORITHMS for name in algorithms_of(collective)} - {"pairwise"}
    assert names | {"auto", "native"} == set(ALGORITHM_NAMES)


def norms_of_parts(world):
    """LAMB over parts of three parameters: cut over all ranks, held by all, and tied to the second."""
    whole = torch.arange(1.0, 9.0, dtype=torch.float64)
    mine = whole.chunk(world.size)[world.rank].clone().requires_grad_()
    same, tied = (whole.clone().requires_grad_() for _ in range(2))
    placement = Placement.whole("cut", (8,))
    set_placement(mine, placement.split(0, 8 // world.size * world.rank, 8 // world.size))
    set_placement(same, Placement.whole("same", (8,)))
    set_placement(tied, replace(Placement.whole("tied", (8,)), tied_to="same"))
    optimizer = lamb_over(Mesh(world, dp=world.size).comm("dp", "cp", "tp"))([mine, same, tied], lr=0.1)
    for x in (mine, same, tied):
        x.grad = x.detach().sin()
    optimizer.step()
    return mine.detach(), same.detach(), tied.detach()


def test_lamb_scales_by_the_norms_of_whole_parameters():
    whole = torch.arange(1.0, 9.0, dtype=torch.float64).requires_grad_()
    whole.grad = whole.detach().sin()
    Lamb([whole], lr=0.1).step()
    parts = minipar.run(norms_of_parts, world_size=4)
    assert_equal_to(torch.cat([mine for mine, _, _ in parts]), whole.detach())
    for _, same, tied in parts:
        assert_equal_to(same, whole.detach())
        assert_equal_to(tied, whole.detach())


class OfARow(AdamW):
    """A family whose update of an element depends on others: Adafactor's on rows and columns."""

    def optimizer_class(self, mesh=None):
        return torch.optim.Adafactor


def test_zero_3_refuses_an_optimizer_not_known_to_be_per_element():
    config = replace(DEFAULTS, zero=3)
    with (
        patch.object(type(config.choice("optimizer")), "load", lambda _: OfARow()),
        pytest.raises(ValueError, match="optimizer_cls=Adafactor is not known to update each element"),
    ):
        optimizer_over(config, None, [], None)
