"""A limit on live activations: kept by every schedule, to the byte by a stage, and without a changed bit."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.train_config import VERIFY_DEFAULTS
from minipar.extras.schedules.offloaded import WHOLE, offloaded
from minipar.extras.schedules.offloaded_pipeline import OffloadedStage
from minipar.model import Transformer
from minipar.pipeline.emulate import emulate
from minipar.schedules import Costs, lower, make_schedule, simulate
from minipar.schedules.validate import validate
from minipar.train import recompute
from minipar.train.verification.verify import table, verify
from tests.data_parallel.memory import Peak
from tests.pipeline.programs import assert_same, make_batch, one_process, small_config, together, train_step


@given(st.integers(1, 5), st.integers(1, 12), st.sampled_from(WHOLE), st.integers(1, 8))
def test_no_rank_holds_more_than_the_limit(p, m, of, limit):
    base, schedule = make_schedule(of, p, m), offloaded(p, m, of, limit)
    validate(schedule)
    assert (schedule.actions, lower(schedule)) == (base.actions, lower(base))
    before = simulate(base).peak_live
    assert simulate(schedule).peak_live == tuple(min(limit, live) for live in before)
    assert bool(schedule.offloaded) == (max(before) > limit)


def test_stages_that_sleep_have_nothing_to_offload():
    schedule = offloaded(2, 3, "gpipe", 1)
    assert schedule.offloaded
    spans = minipar.run(emulate, schedule, Costs(0, 0, 0), 1, world_size=2)
    assert [spans_of.keys() for spans_of in spans] == [set(actions) for actions in schedule.actions]


class Elsewhere:
    """What a tensor's copy in CPU memory is on a machine whose device is the CPU: numbers that no tensor holds."""

    def __init__(self, x: torch.Tensor):
        self.numbers, self.dtype = x.tolist(), x.dtype

    def to(self, device, non_blocking):
        return torch.tensor(self.numbers, dtype=self.dtype)


def bytes_after_each_action(limit: int, mode: str = "none", to_cpu=Elsewhere) -> list[int]:
    """What the middle stage of three holds for its units, after each action of GPipe on four microbatches."""
    schedule = offloaded(3, 4, "gpipe", limit)
    config = small_config(6, max_seq_len=8)
    part = Transformer(config, dtype=torch.float64).stage([2, 3], first=False, last=False)
    recompute.recompute(part, mode)
    stage = OffloadedStage({k for s, k in schedule.offloaded if s == 1}, part, 1, 4, set())
    for p in part.parameters():
        p.grad = torch.zeros_like(p)
    stage.begin()
    numbers = {
        "positions": torch.arange(8),
        "sample_ids": torch.arange(2),
    }  # as a run has them: once for all units
    held: list[int] = []
    with patch.object(recompute, "to_cpu", to_cpu), Peak() as memory:
        for x in (*numbers.values(), *(y for p in part.parameters() for y in (p, p.grad))):
            x.sum()  # so that it is counted
        before = memory.now()
        for op, _, unit in schedule.actions[1]:
            if op == "F":
                stage.forward(unit, torch.full((2, 8, 8), 0.1 * unit, dtype=torch.float64), numbers)
            else:
                stage.backward(unit, torch.ones(2, 8, 8, dtype=torch.float64))
            held.append(memory.now() - before)
    return held


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_stage_holds_the_units_that_are_not_offloaded_to_the_byte(mode):
    """Each kept unit as many bytes as one: after F, offloaded or not, and after B."""
    unit, *_ = plain = bytes_after_each_action(4, mode)
    assert plain == [unit * n for n in (1, 2, 3, 4, 3, 2, 1, 0)]
    assert unit >= 2 * 8 * 8 * 8  # the stage's input at least
    # Room for two: the third forward needs that of the second unit, the fourth that of the third.
    assert {k for s, k in offloaded(3, 4, "gpipe", 2).offloaded if s == 1} == {1, 2}
    assert bytes_after_each_action(2, mode) == [unit * n for n in (1, 1, 1, 2, 1, 1, 1, 0)]
    assert bytes_after_each_action(1, mode) == [0] * 8


def test_a_planted_fault_is_seen_in_the_bytes():
    """Copies stay on the device; or inputs are kept, as autograd keeps them."""
    unit = bytes_after_each_action(4)[0]
    assert bytes_after_each_action(1, to_cpu=torch.clone)[3] > 3 * unit
    with patch.object(OffloadedStage, "_free"):
        assert bytes_after_each_action(1)[3] == 4 * 2 * 8 * 8 * 8


@pytest.mark.parametrize(
    ("of", "limit"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("breadth-first", 3)]
)
def test_offloading_changes_no_bit(of, limit):
    schedule = offloaded(2, 4, of, limit)
    assert schedule.offloaded
    config = small_config(4, dropout=0.1)
    batch = make_batch(config, 8)
    parts = minipar.run(train_step, config, torch.float32, schedule, batch, world_size=2)
    loss, grads = together(parts)
    want_loss, want = one_process(config, torch.float32, batch, 4)
    assert torch.equal(loss, want_loss)
    assert_same(grads, want, 0.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [
        dict(pp=2, dp=2, zero=3, recompute="every:2", microbatches=4),
        dict(pp=2, tp=2, sequence_parallel=True, microbatches=4, recompute="full"),
    ],
    ids=str,
)
def test_a_mesh_that_offloads_gives_the_numbers_of_one_process(mesh):
    schedule = ("offloaded", {"of": "gpipe", "limit": 1})
    result = verify(VERIFY_DEFAULTS.choosing(batch_size=8, schedule=schedule, **mesh))
    assert result.equal, table(result)


def test_what_cannot_be_offloaded_is_refused():
    with pytest.raises(ValueError, match="limit=0; use 1 or more"):
        offloaded(2, 4, limit=0)
    with pytest.raises(ValueError, match="of='zb-h1' has no whole backwards"):
        offloaded(2, 4, "zb-h1")
    for name, changes in (
        ("offload_activations", {}),
        ("partition_activations", dict(tp=2, recompute="full")),
    ):
        with pytest.raises(ValueError, match=f"{name}=True; leave one out"):
            VERIFY_DEFAULTS.choosing(
                pp=2,
                microbatches=2,
                schedule="offloaded",
                **changes,
                **{name: True, "sequence_parallel": False},
            )
