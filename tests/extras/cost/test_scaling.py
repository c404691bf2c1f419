"""Weak and strong scaling of a layout."""

from dataclasses import replace

import pytest

from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS
from minipar.extras.cost.scaling import scaling
from minipar.visualize.cost import scaling_figure


def test_weak_scaling_stays_and_strong_scaling_falls():
    job = Job(MODELS["llama-7b"], MACHINES["h100"], 8, 4096, 512)
    gpus = [8 * 2**k for k in range(12)]
    weak = scaling(job, parse_layout("dp8-zero1"), gpus, weak=True)
    strong = scaling(job, parse_layout("dp8-zero1"), gpus, weak=False)
    assert [p.gpus for p in weak] == gpus
    assert max(p.gpus for p in strong) == 512  # from there on a rank would have no sample
    assert weak[0].efficiency == strong[0].efficiency == 1
    assert all(b.efficiency <= a.efficiency * 1.001 for a, b in zip(strong, strong[1:]))
    assert strong[-1].efficiency < weak[6].efficiency
    assert all(b.seconds < a.seconds for a, b in zip(strong, strong[1:]))


# Pictures -------------------------------------------------------------------------------------------------------------

JOB = Job(MODELS["llama-7b"], MACHINES["h100"], 8, 4096, 16)


def test_a_scaling_curve_has_a_point_per_number_of_gpus():
    gpus = [8 * 2**k for k in range(12)]
    curves = {
        "weak": scaling(JOB, parse_layout("dp8-zero1"), gpus, weak=True),
        "strong": scaling(replace(JOB, batch=4096), parse_layout("dp8-zero1"), gpus, weak=False),
    }
    left, right = scaling_figure(curves).axes
    assert [len(line.get_xdata()) for line in left.lines] == [len(points) for points in curves.values()]
    assert left.lines[0].get_ydata()[0] == pytest.approx(1)
    assert list(right.lines[1].get_ydata()) == [p.communication for p in curves["strong"]]
