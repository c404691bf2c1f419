"""What Pipeline refuses, in which words, before or as soon as it can know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import minipar
from minipar.pipeline import Pipeline, measured
from minipar.schedules.deadlock import Deadlock
from minipar.schedules.gpipe import gpipe
from minipar.schedules.one_f_one_b import one_f_one_b
from minipar.schedules.v_shaped import zb_v
from tests.pipeline.programs import mean_square, refusal


class Shifty(nn.Module):
    """The first `good` outputs have the shape of the input, the next is longer."""

    def __init__(self, good: int):
        super().__init__()
        self.weight, self.left = nn.Parameter(torch.ones(4)), good

    def forward(self, x):
        self.left -= 1
        out = x * self.weight
        return out if self.left >= 0 else torch.cat([out, out])


def identity():
    return nn.Linear(4, 4)


X = torch.ones(4, 4)


def with_another_schedule(world):
    for mine, says in (
        (one_f_one_b(2, 2 + 2 * world.rank), "num_microbatches is 2 on rank 0, and 4 on rank 1"),
        ([one_f_one_b, gpipe][world.rank](2, 4), "name is 1f1b on rank 0, and gpipe on rank 1"),
        (replace([one_f_one_b, gpipe][world.rank](2, 4), name="own"), "actions is of checksum"),
    ):
        with pytest.raises(ValueError, match=says):
            Pipeline([identity()], world, mine)


def test_ranks_with_different_schedules_are_told_so():
    minipar.run(with_another_schedule, world_size=2)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            lambda world: Pipeline([identity()], world, one_f_one_b(2, 2)),
            "schedule 1f1b is for 2 ranks, the pipeline's comm has 1",
        ),
        (
            lambda world: Pipeline([identity()], world, zb_v(1, 2)),
            "1 stages given on rank 0, to which schedule zb-v gives 2: numbers [0, 1]",
        ),
        (
            lambda world: Pipeline([identity()], world, gpipe(1, 3), mean_square).step(X, X),
            "num_microbatches=3 does not divide inputs.shape[0]=4; use 1, 2 or 4",
        ),
        (
            lambda world: Pipeline([identity()], world, gpipe(1, 2), mean_square).step(X, X[:3]),
            "num_microbatches=2 does not divide targets.shape[0]=3; use 1 or 3",
        ),
        (
            lambda world: Pipeline([identity()], world, gpipe(1, 2), mean_square).step(X),
            "targets=None on rank 0, which holds stages [0]; give the batch",
        ),
        (
            lambda world: Pipeline([identity()], world, gpipe(1, 2), mean_square).step(None, X),
            "inputs=None on rank 0, which holds stages [0]; give the batch",
        ),
        (
            lambda world: Pipeline([identity()], world, gpipe(1, 2), lambda x, y: x - y).step(X, X),
            "a microbatch's loss has shape (2, 4); use a loss_fn that returns one number",
        ),
        (
            lambda world: Pipeline([Shifty(1), identity()], world, zb_v(1, 2), mean_square).step(X, X),
            "stage 0 returned [4, 4] float32 for microbatch 1 and [2, 4] float32 before; use one shape for all "
            "microbatches, and call forget_shapes() on every rank before a step of another",
        ),
        (
            lambda world: Pipeline([nn.Embedding(4, 4), nn.LSTM(4, 4)], world, zb_v(1, 1), mean_square).step(
                X.long(), X
            ),
            "stage 1 returned a tuple; use a module that returns one tensor",
        ),
        (
            lambda world: Pipeline([nn.Identity(), identity()], world, zb_v(1, 1)).step(X.long(), X),
            "stage 0 returned [4, 4] int64; the next stage takes a tensor of floats of at most 8 dims",
        ),
        (lambda world: gpipe(1, 0), "m=0; use a whole number of 1 or more"),
    ],
)
def test_a_bad_request_is_one_clear_line(fn, message):
    (said,) = refusal(fn)
    assert said == message


def test_every_rank_refuses_an_impossible_schedule_up_front():
    schedule = one_f_one_b(2, 2)
    (f0, *middle, b1) = schedule.actions[0]
    stuck = replace(schedule, actions=((b1, *middle, f0), schedule.actions[1]))
    said = refusal(lambda world: Pipeline([identity()], world, stuck), world_size=2, expected=Deadlock)
    assert len(set(said)) == 1
    assert (
        "rank 0 cannot run B of microbatch 1 on stage 0 before F of microbatch 1 on stage 0, on rank 0"
        in said[0]
    )


def _two_shapes(world, forget):
    pipeline = Pipeline([nn.Linear(4, 4)], world, gpipe(2, 2), mean_square)
    for size in (4, 8, 8):
        x = torch.ones(size, 4)
        if forget:
            pipeline.forget_shapes()
        pipeline.step(x, x)
    return True


def test_steps_of_different_shapes_are_fine_once_every_rank_knows():
    assert minipar.run(_two_shapes, True, world_size=2, timeout_s=60) == [True, True]
    with pytest.raises(minipar.RankError, match=r"stage 0 returned \[4, 4\] .* and \[2, 4\] float32 before"):
        minipar.run(_two_shapes, False, world_size=2, timeout_s=60)


def test_a_measured_timeline_needs_the_spans_of_every_rank():
    with pytest.raises(ValueError, match="4 actions have no span, F of microbatch 0 on stage 0 first"):
        measured(gpipe(1, 2), [{}])
