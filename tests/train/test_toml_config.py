"""A configuration as a file: whatever is written is read again, and what is wrong in one is named."""

import pytest
from hypothesis import given

from minipar.cli import main
from minipar.flags import config_of, flags_of
from minipar.train import TrainConfig
from minipar.train.toml_config import as_toml, read_settings
from tests.train.test_verification import configs


@given(configs())
def test_a_written_configuration_is_read_again(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(as_toml(config))
    assert config_of(flags_of(TrainConfig(), read_settings(path)), TrainConfig) == config


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("stepz = 4", "stepz is no setting; did you mean steps"),
        ("[model]\nlayers = 4", "layers is no setting"),
        ('dp = "2"', "dp='2' is a str; use a whole number"),
        ("dp = true", "dp=True is a bool; use a whole number"),
        ("steps = 1.5", "steps=1.5 is a float; use a whole number"),
        ("batch_size = 16.0", "batch_size=16.0 is a float; use a whole number"),
        ("lr = inf", "lr=inf is no number to compute with"),
        ("[model]\nrope_theta = nan", "rope_theta=nan is no number to compute with"),
        ('name = "a/b"', "name='a/b' is not the name of one folder"),
        ("model = 3", "model=3 is a int; use ModelConfig"),
        ("dp = 3\n", "dp=3 does not divide batch_size=16"),
        ("dp", "is not TOML"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(tmp_path, capsys, content, says):
    path = tmp_path / "run.toml"
    path.write_text(content)
    with pytest.raises(SystemExit) as left:
        main(["train", "--config", str(path), "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert says in said
    assert said.count("\n") == 1


def test_flags_win_over_the_file_and_the_run_leaves_its_own(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(
        "steps = 3\ndp = 2\nverify_steps = 1\nbatch_size = 4\n[model]\ndim = 16\nnum_layers = 2\n"
    )
    main(["train", f"--config={path}", "--steps", "2", "--out", str(tmp_path / "run")])
    left = read_settings(tmp_path / "run" / "config.toml")
    assert (left["steps"], left["dp"], left["model"]["dim"]) == (2, 2, 16)
    assert "in 2 steps" in capsys.readouterr().out
