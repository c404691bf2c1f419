"""Unequal parts of a batch for unequal machines: the fastest division there is, and the numbers of one process."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.mesh_rules import shares_by_speed
from minipar.config.toml_config import as_toml, read_settings
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.mesh import Mesh
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.step import gradients, local_batch
from minipar.train.verification.verify import table, verify
from tests.cost.runs import RUN, sent


@given(st.integers(0, 6), st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=3))
def test_no_other_division_is_done_earlier(more, speeds):
    total = len(speeds) + more
    shares = shares_by_speed(total, speeds)
    assert sum(shares) == total
    assert min(shares) >= 1
    others = (s for s in product(range(1, total + 1), repeat=len(speeds)) if sum(s) == total)
    done_s = [max(n / speed for n, speed in zip(s, speeds)) for s in (shares, *others)]
    assert done_s[0] == min(done_s)


def test_a_rank_at_half_the_speed_gets_half_the_samples():
    config = replace(RUN, dp=2, dp_speeds=(2, 1), batch_size=9)
    assert config.dp_samples == [6, 3]
    sixfold = replace(config, batch_size=18, microbatches=3)
    for more, microbatches in (({}, [4, 2]), (dict(zero=3), [3, 3])):
        divided = replace(sixfold, **more)
        assert divided.dp_microbatches == microbatches
        assert divided.dp_samples == [12, 6]
    assert replace(config, batch_size=2, dp_speeds=(100, 1)).dp_samples == [1, 1]  # nobody is left without


MESHES = [
    dict(dp=2, dp_speeds=(2, 1), batch_size=9),
    dict(dp=3, dp_speeds=(3, 1, 1.5), batch_size=12, pp=2, microbatches=2, zero=3),
    dict(dp=2, dp_speeds=(1, 3), batch_size=8, ep=2, moe=4, zero=1),
    dict(dp=2, dp_speeds=(2, 1), batch_size=6, pp=2, microbatches=3, zero=2),
    dict(dp=2, dp_speeds=(4, 1), batch_size=8, cp=2, tp=2, microbatches=2, dtype="bfloat16"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_unequal_parts_give_the_numbers_of_one_process(mesh):
    result = verify(replace(VERIFY_DEFAULTS, **mesh))
    assert result.equal, table(result)


def loss(world, config, divided_by_own):
    """The loss of the first step, right, or as the mean of the ranks' means."""
    mesh = Mesh(world, **config.mesh_sizes)
    state = parallelize(config, mesh, world.device)
    batch = local_batch(mesh, config, load_text(None), 0, world.device)
    if divided_by_own:
        batch = batch._replace(num_targets=config.dp * batch.targets.numel())
    return gradients(world, state, config, load_text(None), 0, batch).item()


def test_a_mean_of_means_is_wrong_where_parts_are_unequal():
    """Planted fault: it weighs a sample of the smaller part more. With equal parts nobody would notice."""
    config = replace(RUN, dp=2, batch_size=9, dp_speeds=(2, 1))
    for case, equal in ((config, False), (replace(config, batch_size=8, dp_speeds=None), True)):
        (right, *_), (wrong, *_) = (minipar.run(loss, case, own, world_size=2) for own in (False, True))
        assert (abs(right - wrong) < 1e-12) == equal


def test_what_is_sent_does_not_depend_on_the_parts():
    config = replace(RUN, dp=2, zero=1)
    even, uneven = (
        [axes["dp"] for _, axes, _ in minipar.run(sent, replace(config, dp_speeds=speeds), world_size=2)]
        for speeds in (None, (3, 1))
    )
    assert even == uneven


def test_stages_send_in_proportion_to_their_microbatches():
    """Of 2 * 3 microbatches a rank at twice the speed runs 4: its stages send each other twice the bytes."""
    config = replace(RUN, dp=2, pp=2, batch_size=6, microbatches=3, dp_speeds=(2, 1))
    (_, fast, _), (_, slow, _) = minipar.run(sent, config, world_size=4)[:2]
    assert fast["pp"] == 2 * slow["pp"] > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(dp_speeds=(1, 2, 3)), "give a number above 0 per dp rank"),
        (dict(dp_speeds=(1, 0)), "give a number above 0 per dp rank"),
        (dict(dp_speeds=(1, 2), batch_size=3, microbatches=3, zero=3), "use batch_size=6 or more"),
        (dict(dp_speeds=(1, 2), batch_size=9, microbatches=3), "dp=2 does not divide batch_size=9"),
        (dict(dp_speeds=(1, 2), compress="int8"), "use one of the two"),
        (dict(dp_speeds=("fast", 2)), "use a list, each a number"),
    ],
)
def test_speeds_that_cannot_be_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        TrainConfig(**{"dp": 2} | options)


def test_speeds_are_kept_in_a_file(tmp_path):
    config = TrainConfig(dp=2, dp_speeds=[2, 1])
    (tmp_path / "config.toml").write_text(as_toml(config))
    assert config.dp_speeds == (2.0, 1.0)
    assert (
        replace(TrainConfig(dp=2), dp_speeds=read_settings(tmp_path / "config.toml")["dp_speeds"]) == config
    )
