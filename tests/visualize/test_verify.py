from dataclasses import replace

import pytest

from minipar.config.train_config import VERIFY_DEFAULTS as DEFAULTS
from minipar.train.verification.verify import Row, Verification
from minipar.visualize.verify import draw_sweep, sweep_markdown


def results():
    good, bad = Row("loss", 1, 3e-15, "loss", 0, True), Row("loss", 1, 0.5, "loss", 1, False)
    return [
        Verification(replace(DEFAULTS, dp=2), [good]),
        Verification(replace(DEFAULTS, dp=2, zero=2), [bad]),
        Verification(replace(DEFAULTS, pp=2, microbatches=2, schedule="zb-h1"), [good]),
    ]


def test_the_table_has_a_row_a_mesh_and_marks_what_differs():
    lines = sweep_markdown(results()).splitlines()
    assert lines[0] == "| mesh | no pipeline, ZeRO-0 | no pipeline, ZeRO-2 | zb-h1, ZeRO-0 |"
    assert lines[2] == "| dp2 | 3e-15 | **5e-01** |  |"
    assert lines[3] == "| pp2 |  |  | 3e-15 |"


# matplotlib warns where a few cells leave no room for the sentence below them
@pytest.mark.filterwarnings("error")
def test_the_picture_of_few_runs_is_written(tmp_path):
    assert draw_sweep(results(), tmp_path / "sweep.png").stat().st_size > 0
