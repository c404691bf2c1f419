"""What a stage keeps between two units of work follows from its schedule."""

import pytest
import torch

from minipar.extras.schedules.offloaded_units import OffloadedUnits
from minipar.extras.schedules.stage_slices import SequenceSlices
from minipar.model import Transformer
from minipar.pipeline.stage import Stage
from minipar.pipeline.stage_state import WholeSamples, make_stage_state
from tests.pipeline.programs import small_config


@pytest.mark.parametrize(
    ("slices", "offloaded", "kept"),
    [(1, set(), WholeSamples), (2, set(), SequenceSlices), (1, {0, 2}, OffloadedUnits)],
)
def test_a_stage_keeps_what_its_schedule_asks_for(slices, offloaded, kept):
    model = Transformer(small_config(1), 1)
    assert type(make_stage_state(model, slices, offloaded, "0")) is kept


def test_without_gradients_a_samples_last_slice_ends_what_is_kept_of_it():
    stage = Stage(Transformer(small_config(1), 1), 0, frozenset(), recompute=False, slices=3)
    stage.begin(6)
    released = []
    stage._state.release = released.append
    with torch.no_grad():
        for unit, so_far in enumerate(([], [], [0], [0], [0], [0, 3])):
            stage.forward(unit, torch.zeros(1, 1, dtype=torch.int64), {})
            assert released == so_far
