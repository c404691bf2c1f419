"""GPUs of two kinds: the division that a step's time asks for, and flags that make the trainer divide a batch like this."""

import json

import pytest

from minipar.config.train_config import TrainConfig
from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS
from minipar.cost.plan_command import plan_command
from minipar.extras.cost import unequal
from minipar.extras.cost.choices import UnequalOptions

A100 = MACHINES["a100-80gb"]
REQUEST = dict(model="llama-7b", gpus=8, machine="a100-80gb", seq=2048, batch=64, view="unequal")
LAYOUTS = [
    "dp8-zero1-mb2-full",
    "dp4-pp2-zero1-mb1-interleaved:2-full",
    "dp8-zero3-mb1-full",
    "dp8-zero1-mb8-full",
]


def replicas(name: str, gpus: int = 4, speed: float = 0.5) -> unequal.Replicas:
    """Return the replicas of a layout on A100s, `gpus` of which are slower."""
    job = Job(MODELS["llama-7b"], A100, 8, 2048, 64)
    return unequal.replicas_of(job, parse_layout(name), UnequalOptions(gpus, speed=speed))


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_by_speed_are_as_good_as_any(name):
    """Half of the GPUs have half the speed, s = f = 1/2: by speed is at most (1 - f + f s) / s = 1.5 times as fast."""
    of = replicas(name)
    equal, best = unequal.equal_parts(of), unequal.by_speed(of)
    assert sum(n for part in best.samples for n in part) == 64
    assert 1.25 < equal.step_s / best.step_s <= 1.5 * 1.01
    m, b, each = of.layout.microbatches(of.job), of.layout.microbatch, of.layout.dp // 2
    if of.layout.zero == 3 or m == 1:
        return
    tried = []
    for fast in range(1, 2 * m):
        try:
            parts = [(fast, b)] * each + [(2 * m - fast, b)] * each
            tried.append(unequal._division(of, parts).step_s)
        except ValueError:
            continue
    assert best.step_s <= min(tried) * (1 + 1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gpus_that_are_alike_get_equal_parts(name):
    of = replicas(name, speed=1.0)
    equal, best = unequal.equal_parts(of), unequal.by_speed(of)
    assert best.step_s == pytest.approx(equal.step_s, rel=1e-9)
    assert len({n for part in best.samples for n in part}) == 1


def test_a_part_that_ignores_the_speed_is_noticed(monkeypatch):
    """Planted fault: the faster kind waits, as it does with equal parts."""
    of = replicas(LAYOUTS[0])
    monkeypatch.setattr(unequal, "_speeds", lambda replicas, m, b: [1.0] * replicas.layout.dp)
    assert unequal.equal_parts(of).step_s / unequal.by_speed(of).step_s <= 1.25  # what the test above refuses


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_printed_flags_make_the_trainer_divide_like_this(name):
    outcome = plan_command(**REQUEST, explain=name, view_options={"gpus": 4})
    (flags,) = (line for line in outcome.text.splitlines() if line.startswith("--dp "))
    words = flags.split()
    speeds = words[words.index("--dp-speeds") + 1 : words.index("--batch-size")]
    layout, microbatches = parse_layout(name), int(words[-1])
    config = TrainConfig(
        dp=layout.dp,
        dp_speeds=[float(speed) for speed in speeds],
        batch_size=64,
        microbatches=microbatches,
        zero=layout.zero,
    )
    best = unequal.by_speed(replicas(name))
    assert config.dp_samples == [n for part in best.samples for n in part]
    assert config.dp_microbatches == [m for part in best.microbatches for m in part]


def test_the_view_answers_for_the_layout_that_is_best_on_both():
    entry = json.loads(
        plan_command(**REQUEST | dict(gpus=4, batch=8), view_options={"gpus": 2}, as_json=True).text
    )["unequal"]
    assert entry["by_speed"]["step_s"] <= entry["equal"]["step_s"]
    assert max(entry["by_speed"]["seconds"]) == entry["by_speed"]["step_s"]


@pytest.mark.parametrize(
    ("options", "changes", "says"),
    [
        (dict(gpus=8), {}, "use 1 or more, but not all"),
        (dict(gpus=4, speed=0.0), {}, "use a number above 0"),
        (dict(gpus=4, machine="a1000"), {}, "a1000"),
        (dict(gpus=3), dict(explain="dp4-tp2-zero1-full"), "use a multiple of 2 below 8"),
    ],
)
def test_what_cannot_be_divided_is_refused(options, changes, says):
    with pytest.raises(ValueError, match=says):
        plan_command(**REQUEST | changes, view_options=options)
