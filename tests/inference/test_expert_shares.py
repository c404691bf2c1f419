"""Expert parallelism in serving: texts of one process, bytes of both ways, and an expert's share left out."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch

import minipar
from minipar.config.model_config import ModelConfig
from minipar.expert import expert_parallel
from minipar.inference import Engine, Options, Request, expert_shares
from minipar.inference.blocks import BlockPool
from minipar.inference.expert_shares import OwnShare, check_expert_parallel
from minipar.inference.paged_model import PagedModel
from minipar.inference.split_keys import gather_logits
from minipar.mesh import Mesh
from minipar.model.moe import MoE, moe_layers
from minipar.support.errors import RankError
from tests.inference.meshes import read_in_pieces
from tests.inference.test_engine import plant
from tests.inference.texts import PROMPTS
from tests.model.texts import loud_model
from tests.strategies import assert_equal_to

D, E, K, LAYERS = 16, 4, 2, 2
CONFIG = ModelConfig(
    vocab_size=13, dim=D, num_layers=LAYERS, num_heads=2, max_seq_len=40, moe_every=1, num_experts=E, top_k=K,
    capacity_factor=None, shared_dim=8,
)  # fmt: skip
PIECES = [9, 1, 2, 1]


def read_on(world, sizes, fault=None):
    """On a rank: read a text in pieces.

    Return the logits, on the first cp rank; bytes over ep by kind; choices of experts elsewhere; elements of the experts.
    """
    with ExitStack() as stack:
        if fault:
            plant(stack.enter_context(pytest.MonkeyPatch.context()), *FAULTS[fault])
        mesh = Mesh(world, **sizes)
        ep, cp, model = mesh.comm("ep"), mesh.comm("cp"), loud_model(CONFIG)
        expert_parallel(model, ep)
        elsewhere, route = [], MoE.route

        def note(self, logits, groups, draw=None):
            routing = route(self, logits, groups, draw)
            elsewhere.append(int((routing.expert // (E // ep.size) != ep.rank).sum()))
            return routing

        stack.enter_context(mock.patch.object(MoE, "route", note))
        paged, logits = PagedModel(model, BlockPool(8, 4), mesh=mesh), []
        for rows, own in read_in_pieces(paged, [[count] for count in PIECES]):
            logits.append(own if cp.size == 1 else gather_logits(cp, rows, own))
        held = sum(p.numel() for _, moe in moe_layers(model) for p in moe.experts.parameters())
        whole = None if logits[0] is None else torch.cat(logits)
        return whole, dict(ep.traffic.by_kind), sum(elsewhere), held


def read_and_compare(sizes, fault=None):
    world_size = sizes.get("dp", 1) * sizes.get("cp", 1)
    ranks = minipar.run(read_on, sizes, fault, world_size=world_size)
    with torch.no_grad():
        want = loud_model(CONFIG)(torch.tensor([PROMPTS[0][: sum(PIECES)]]))[0]
    for logits, *_ in ranks:
        if logits is not None:
            assert_equal_to(logits, want)
    return ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ep", [2, 4])
def test_ranks_with_all_tokens_send_one_all_reduce_a_mixture(ep):
    ranks = read_and_compare(dict(dp=ep, ep=ep))
    for logits, sent, _, held in ranks:
        assert torch.equal(logits, ranks[0][0])
        assert held == ranks[0][3] == LAYERS * 3 * E // ep * D * CONFIG.hidden_dim
        assert sent.keys() == {"all_reduce"}
    total = sum(sent["all_reduce"] for _, sent, *_ in ranks)
    assert total == 2 * (ep - 1) * sum(PIECES) * D * LAYERS * 8


@pytest.mark.parametrize("sizes", [dict(cp=2, ep=2), dict(cp=4, ep=2), dict(cp=4, ep=4)])
def test_ranks_send_a_row_there_and_back_for_each_expert_choice(sizes):
    ranks = read_and_compare(sizes)
    for kind, want in [
        ("all_to_all", 2 * D * 8 * sum(elsewhere for _, _, elsewhere, _ in ranks)),
        ("all_gather", sizes["cp"] * (sizes["ep"] - 1) * 8 * E * LAYERS * len(PIECES)),
    ]:
        assert sum(sent[kind] for _, sent, *_ in ranks) == want


SUM = "self.ep.all_reduce(share)"
FAULTS = {
    "one rank's share left out": (
        OwnShare,
        "through",
        SUM,
        "self.ep.all_reduce(share * (self.ep.rank != 1))",
    ),
    "an expert left out": (
        expert_shares,
        "own_plan",
        "(~is_own,",
        "(~is_own | (plan.row < begin + counts[0]),",
    ),
    "experts of another rank": (OwnShare, "__init__", "ep.rank * own, own", "0, own"),
    "shares not summed": (OwnShare, "through", SUM, "share"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault):
    with pytest.raises(AssertionError, match=r"max\|a - b\| ="):
        read_and_compare(dict(dp=2, ep=2), fault)


@pytest.mark.parametrize(
    ("config", "ep", "cp", "says"),
    [
        (ModelConfig(), 2, 1, "ep=2: this model has no experts to spread; use ep=1"),
        (CONFIG, 3, 1, "ep=3 does not divide num_experts=4; use 1, 2 or 4"),
        (CONFIG, 4, 2, "ep=4 does not divide cp=2; use 1 or 2"),
    ],
)
def test_a_mesh_that_cannot_serve_the_experts_is_refused(config, ep, cp, says):
    with pytest.raises(ValueError, match=says):
        check_expert_parallel(config, ep, cp)


def test_experts_that_nobody_cut_are_refused():
    def make(world):
        Engine(loud_model(CONFIG), Options(), Mesh(world, dp=2, ep=2)).run([Request((1,), 1)])

    with pytest.raises(
        RankError, match="a rank has 4 of num_experts=4 experts, the mesh ep=2; call expert_par"
    ):
        minipar.run(make, world_size=2)
