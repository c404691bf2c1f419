"""Freshly drawn configurations equal one process: other ones in every run, each of which can be run again."""

import os
import secrets
from dataclasses import fields

import numpy as np
import pytest

from minipar.errors import RankError
from minipar.model import ModelConfig
from minipar.train.train_config import TrainConfig
from minipar.train.verification import table, verify
from tests.train.drawn_configs import NOT_DRAWN, NOT_DRAWN_OF_MODEL, drawn_config, options_of


def test_every_option_of_the_model_and_of_the_trainer_is_drawn():
    drawn = [options_of(drawn_config(0, number)) for number in range(60)]
    names = {f.name for f in fields(TrainConfig)} - NOT_DRAWN
    names |= {f"model.{f.name}" for f in fields(ModelConfig) if f.name not in NOT_DRAWN_OF_MODEL}
    same = [name for name in sorted(names) if len({str(options[name]) for options in drawn}) == 1]
    assert not same, "draw them in drawn_configs.py, or say there why they decide no number"


@pytest.mark.slow
def test_freshly_drawn_configurations_equal_one_process(tmp_path, capsys):
    """DRAWS=2000 of them, of a new seed unless DRAW_SEED gives one, from number FIRST_DRAW on."""
    seed = int(os.environ.get("DRAW_SEED", secrets.randbelow(1 << 31)))
    first, count = int(os.environ.get("FIRST_DRAW", 0)), int(os.environ.get("DRAWS", 2000))
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(seed).integers(0, 256, 5000).astype(np.uint16))
    fallen = []
    for number in range(first, first + count):
        config = drawn_config(seed, number, tokens)
        try:
            result = verify(config)
            said = None if result.equal else table(result).splitlines()[-1]
        except RankError as error:
            said = str(error)
        if said is not None:
            fallen.append(f"DRAW_SEED={seed} FIRST_DRAW={number} DRAWS=1: {said}\n{config}")
            with capsys.disabled():
                print(f"\n{fallen[-1]}")
    with capsys.disabled():
        print(f"\nDRAW_SEED={seed}: {count - len(fallen)} of {count} equal one process")
    assert not fallen
