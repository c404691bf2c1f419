"""A cube of tp beside dp, on 16 ranks: the numbers of one process, and the bytes of the cube and of the gradients."""

from dataclasses import replace

import pytest

import minipar
from minipar.config.train_config import VERIFY_DEFAULTS
from minipar.extras.tensor_grids.grid_costs import grid_step_elems
from minipar.model import Transformer
from minipar.train.verification.verify import table, verify
from tests.cost.runs import RUN, SMALL, sent

CUBE = dict(dp=2, tp=8, tp_layout="3d")
MODEL = replace(SMALL, num_kv_heads=4)
FLOAT64 = 8


@pytest.mark.slow
@pytest.mark.parametrize("how", [dict(zero=1), dict(zero=3, microbatches=2, batch_size=16)], ids=str)
def test_a_cube_beside_dp_gives_the_numbers_of_one_process(how):
    model = replace(VERIFY_DEFAULTS.model, num_heads=4, num_kv_heads=4)
    options = CUBE | dict(batch_size=8, steps=2, model=model) | how
    result = verify(VERIFY_DEFAULTS.choosing(**options))
    assert result.equal, table(result)


@pytest.mark.slow
def test_a_cube_beside_dp_sends_its_bytes_and_its_gradients():
    """tp: the formula of a cube for one dp rank's samples. dp: 2 (dp-1)/dp of a rank's parameters."""
    config = RUN.choosing(model=MODEL, **CUBE)
    tokens = config.batch_size * config.seq_len // config.dp
    elems = grid_step_elems(MODEL, "3d", config.tp, tokens)
    shapes = [p.shape for p in Transformer(MODEL, device="meta").parameters()]
    matrices, norms = (sum(s.numel() for s in shapes if len(s) == dims) for dims in (2, 1))
    held = matrices // config.tp + norms // 2  # a norm's halves are on four ranks each
    counted = [axes for _, axes, _ in minipar.run(sent, config, world_size=16)]
    # The loss's sum over rows is one number, which a ring cannot cut.
    assert sum(axes["tp"] for axes in counted) / 16 == pytest.approx(float(elems * FLOAT64), abs=2 * FLOAT64)
    for axes in counted:
        assert 0 <= axes["dp"] - held * FLOAT64 <= 64 * FLOAT64 * len(shapes)
