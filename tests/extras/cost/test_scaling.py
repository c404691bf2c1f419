"""Weak and strong scaling of a layout, and where it becomes communication bound."""

import json
from dataclasses import replace

import pytest

from minipar.cost.layout import Job, parse_layout
from minipar.cost.links import axis_links
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS
from minipar.cost.plan_command import plan_command
from minipar.extras.cost.scaling import bound_gpus, gpu_counts, needed_tokens, scaling, scaling_curves
from minipar.visualize.cost import draw_curves, draw_scaling, scaling_figure

A100 = MACHINES["a100-80gb"]


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


def test_where_data_parallelism_becomes_communication_bound():
    """The batch leaves too few tokens from there on, and enough before; gradients then take longer than the backward."""
    slow = replace(A100, card_bytes_per_s=2e9)
    job, layout = Job(MODELS["llama-7b"], slow, 8, 4096, 1024), parse_layout("dp8-zero1")
    gpus = gpu_counts(layout)
    assert gpus == [2**k for k in range(15)]
    bound = bound_gpus(job, layout, gpus)
    for number in gpus[1:]:
        grown = replace(layout, dp=number)
        tokens, needed = job.batch * job.seq_len / number, needed_tokens(job, grown)
        assert (tokens < needed) == (number >= bound)
        links = axis_links(slow, grown, "dp")
        rate = links.inside if links.nodes == 1 else links.between
        gradients = 2 * (number - 1) / number * 2 * job.shape.num_params / rate
        backward = 4 * job.shape.num_params * tokens / (slow.peak_flops * slow.matmul_fraction * slow.share)
        assert (gradients > backward) == (number >= bound)
    assert bound_gpus(replace(job, batch=10**6), layout, gpus) is None
    one_card = replace(A100, card_bytes_per_s=20e9 / 8 / 0.8)  # the docstring's: 20 GB/s out of a node of 8
    assert needed_tokens(replace(job, machine=one_card), replace(layout, dp=4096)) == pytest.approx(
        10800, rel=0.01
    )


REQUEST = dict(
    model="llama-7b", gpus=8, machine="h100", seq=4096, batch=32, explain="dp8-zero1-full", view="scaling"
)


def test_the_view_prints_its_points_and_returns_curves_to_draw(tmp_path):
    picture = tmp_path / "scaling.svg"
    outcome = plan_command(**REQUEST, view_options={"picture": str(picture)})
    points = json.loads(plan_command(**REQUEST, as_json=True).text)["scaling"]["weak"]
    assert [point["gpus"] for point in points] == gpu_counts(outcome.layouts[0])
    for point in points:
        assert f"{point['gpus']:8,} {point['seconds']:8.3f} {point['efficiency']:8.1%}" in outcome.text
    (curves,) = outcome.curves
    assert draw_curves(curves) == picture
    assert picture.read_text().startswith("<?xml")
    assert not plan_command(**REQUEST).curves


@pytest.mark.parametrize(
    ("picture", "says"),
    [
        ("plan.doc", "view.picture=plan.doc: its name says no format"),
        ("/dev/null/plan.svg", "cannot be written"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_at_once(picture, says):
    with pytest.raises(ValueError, match=says):
        plan_command(**REQUEST | {"explain": "dp3"}, view_options={"picture": picture})


# Pictures -------------------------------------------------------------------------------------------------------------

JOB = Job(MODELS["llama-7b"], MACHINES["h100"], 8, 4096, 16)


def test_a_scaling_curve_has_a_point_per_number_of_gpus(tmp_path):
    gpus = [8 * 2**k for k in range(12)]
    curves = {
        "weak": scaling(JOB, parse_layout("dp8-zero1"), gpus, weak=True),
        "strong": scaling(replace(JOB, batch=4096), parse_layout("dp8-zero1"), gpus, weak=False),
    }
    left, right = scaling_figure(curves).axes
    assert [len(line.get_xdata()) for line in left.lines] == [len(points) for points in curves.values()]
    assert left.lines[0].get_ydata()[0] == pytest.approx(1)
    assert list(right.lines[1].get_ydata()) == [p.communication for p in curves["strong"]]
    assert draw_scaling(curves, tmp_path / "scaling.svg").read_text().startswith("<?xml")
    left, right = scaling_figure(curves, (512, "few tokens")).axes
    assert left.lines[-1].get_xdata()[0] == right.lines[-1].get_xdata()[0] == 512
    assert right.texts[0].get_text() == "few tokens"


def test_where_gradients_can_no_longer_hide_is_said_in_the_picture():
    slow, layout = (
        replace(JOB, machine=replace(JOB.machine, card_bytes_per_s=1e9), batch=1024),
        parse_layout("dp8-zero1"),
    )
    _, right = scaling_figure(*scaling_curves(slow, layout)).axes
    bound = bound_gpus(slow, layout, gpu_counts(layout))
    assert right.lines[-1].get_xdata()[0] == bound
    assert f"{1024 * 4096 // bound:,} tokens" in right.texts[0].get_text()
    assert not scaling_figure(*scaling_curves(replace(JOB, batch=2**20), layout)).axes[1].texts
