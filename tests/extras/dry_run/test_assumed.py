"""What a dry run takes for granted, it says; what it cannot know, it refuses."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from minipar.extras.dry_run.assumed import ASSUMED
from minipar.extras.dry_run.programs import run_ranks
from minipar.extras.dry_run.record import Refused
from minipar.extras.dry_run.run import dry_run
from minipar.mesh import Mesh
from minipar.train import step as step_module
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from tests.extras.dry_run.configs import MIXTURE, RUN, TINY


@pytest.mark.parametrize("assumption", ASSUMED, ids=lambda a: f"{a.module}.{a.function}")
def test_what_is_assumed_is_read_where_it_says(assumption):
    source = Path(import_module(assumption.module).__file__).read_text()
    assert f"def {assumption.function}(" in source


def test_balanced_routing_is_said_to_be_assumed():
    model = replace(MIXTURE, num_layers=1, capacity_factor=None)
    dry = dry_run(replace(RUN, dp=2, ep=2, model=model))
    assert "the router sends every expert as many tokens, and drops none" in dry.assumed
    sizes = {m.num_bytes for m in dry.programs[0].messages() if m.label == "all_to_all float64"}
    # 2 samples of 16 tokens, 2 choices each, half of them for the other rank's experts
    assert sizes == {2 * 16 * 2 // 2 * 32 * 8}


def test_a_number_that_only_a_run_has_is_refused():
    with pytest.raises(Refused, match="depends on numbers, and a dry run has none"):
        run_ranks(1, lambda world, _: torch.nonzero(torch.zeros(3)))  # a row for each nonzero number
    config = replace(RUN, model=replace(TINY, num_layers=1))
    with pytest.raises(Refused, match=r"minipar\.train\.step\.evaluate .* decides by numbers"):
        run_ranks(1, lambda world, _: evaluates(world, config))


def evaluates(world, config):
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    step_module.evaluate(world, state, config, load_text(None))


def test_torchs_own_collectives_are_refused():
    with pytest.raises(Refused, match="algorithm=native"):
        dry_run(replace(RUN, dp=2, algorithm="native"))
