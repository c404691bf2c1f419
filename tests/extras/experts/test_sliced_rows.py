"""Rows go over ep in slices, one by each tp rank: fewer bytes there, more over tp, and the numbers of one process."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import minipar
from minipar.comm import autograd
from minipar.config.train_config import VERIFY_DEFAULTS
from minipar.extras.experts.sliced_rows import SlicedRows
from minipar.model.permute import LocalDispatch
from minipar.train.verification.verify import table, verify
from tests.cost.runs import MIXTURE, RUN, sent

MODEL = replace(MIXTURE, shared_dim=0)
EXPERTS = replace(VERIFY_DEFAULTS.model, num_experts=4, top_k=2)
MESHES = [
    dict(dp=2, ep=2, tp=2),
    dict(dp=2, ep=2, tp=4, sequence_parallel=True, model=replace(EXPERTS, num_heads=4, num_kv_heads=4)),
    dict(dp=4, ep=2, tp=2, zero=3, recompute="full", keep_messages=True, sequence_parallel=True),
    dict(dp=2, ep=2, pp=2, tp=2, microbatches=2, schedule="zb-h1", dispatch=("balance", {"every": 1})),
]


def sent_by_axis(config) -> list[tuple[int, int]]:
    """(bytes over ep, bytes over tp) that each rank sends in a step."""
    return [
        (axes["ep"], axes["tp"]) for _, axes, _ in minipar.run(sent, config, world_size=config.world_size)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", [False, True], ids=["tp", "sequence parallel"])
def test_a_rank_sends_a_part_of_each_row_over_ep(split):
    """Without it each tp rank sends whole rows, with sequence parallelism too, since every tp rank routes all tokens."""
    config = replace(RUN, model=MODEL, dp=2, ep=2, tp=2, sequence_parallel=split)
    t, layers, e, D = config.tp, MODEL.num_layers, 8, MODEL.dim
    T = config.batch_size * config.seq_len // config.dp
    groups, capacity = T // config.seq_len, MODEL.capacity(config.seq_len)
    R = MODEL.num_experts * groups * capacity  # padded, so as many as the experts receive
    counts = layers * 8 * MODEL.num_experts  # of rows per expert, to the other rank
    whole, sliced = sent_by_axis(config), sent_by_axis(config.choosing(tp_layout="ted"))
    assert {ep for ep, _ in whole} == {layers * 4 * R * D * e // 2 + counts}
    assert {ep for ep, _ in sliced} == {layers * 4 * R * D // t * e // 2 + counts}
    more = 4 * R * D + (2 * T * D // t - 3 * T * D if split else -2 * T * D)
    assert {b - a for (_, a), (_, b) in zip(whole, sliced)} == {layers * (t - 1) * more * e // t}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", MESHES, ids=lambda mesh: str({k: v for k, v in mesh.items() if k != "model"})
)
def test_a_mesh_that_sends_slices_gives_the_numbers_of_one_process(mesh):
    result = verify(VERIFY_DEFAULTS.choosing(steps=2, tp_layout="ted", **{"model": EXPERTS, **mesh}))
    assert result.equal, table(result)


def gradient_of_a_row(world, fault):
    """Slices of one row, whole in between, where rank r multiplies by r + 1: (the sum's slice, the gradient's slice)."""
    x = torch.arange(4.0, dtype=torch.float64)[None].chunk(world.size, 1)[world.rank].clone().requires_grad_()
    rows = SlicedRows(LocalDispatch, world, x, torch.tensor([1]))
    with patch.object(autograd, "all_gather", autograd.gather if fault else autograd.all_gather):
        y = rows.through(lambda rows, counts: rows * (world.rank + 1.0))
    y.sum().backward()
    return y.tolist(), x.grad.tolist()


@pytest.mark.parametrize("fault", [False, True])
def test_gradients_of_whole_rows_are_summed_over_tp(fault):
    """Planted fault: a gather whose backward takes a slice of this rank's own gradient alone."""
    for rank, (y, grad) in enumerate(minipar.run(gradient_of_a_row, fault, world_size=2)):
        assert y == [[3.0 * x for x in (0.0, 1.0, 2.0, 3.0)[2 * rank : 2 * rank + 2]]]
        assert grad == [[1.0 + rank if fault else 3.0] * 2]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(model=VERIFY_DEFAULTS.model, ep=1), "the model sends none"),
        (dict(ep=1), "they go over ep, sliced over tp"),
        (dict(model=replace(EXPERTS, shared_dim=8)), "a shared expert needs whole tokens"),
        (dict(dispatch=("shadow", {})), "dispatch=shadow sends other things"),
    ],
)
def test_what_cannot_be_sliced_is_refused(options, why):
    good = dict(dp=2, ep=2, tp=2, tp_layout="ted", model=EXPERTS)
    with pytest.raises(ValueError, match=why):
        VERIFY_DEFAULTS.choosing(**good | options)
