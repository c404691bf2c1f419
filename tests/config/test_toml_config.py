"""A configuration as a file: whatever is written is read again, and what is wrong in one is named."""

from pathlib import Path

import pytest
from hypothesis import given

from minipar.cli import main
from minipar.cli.choices import options_of
from minipar.cli.flags import config_of, flags_of
from minipar.config.choices import CHOSEN
from minipar.config.model_config import ModelConfig
from minipar.config.toml_config import as_toml, read_settings
from minipar.config.train_config import TrainConfig
from tests.train.verification.test_verify import configs


@given(configs())
def test_a_written_configuration_is_read_again(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(as_toml(config))
    assert config_of(flags_of(TrainConfig(), read_settings(path)), TrainConfig) == config


def test_a_derived_size_is_not_written_but_derived_again():
    assert "head_dim" not in as_toml(TrainConfig())
    given = TrainConfig(model=ModelConfig(head_dim=20))
    assert "head_dim = 20\n" in as_toml(given)


def every_choice():
    """(kind, name, options) of every choice, with no option at its default."""
    for kind, choices in CHOSEN.items():
        for name, choice in choices.usable().items():
            defaults = {} if choice.options is None else vars(choice.options())
            yield kind, name, {option: otherwise(option, default) for option, default in defaults.items()}


# A value of each option that is no default: the names of all options are here.
OTHERWISE = {
    "slices": 3, "rank": 2, "warmup": 7, "every": 5, "fraction": 0.25, "node_size": 2, "depth": 3, "chunks": 4,
    "rows": 1.5, "folder": Path("/tmp"), "feedback": False, "scale": "ceil", "of": "gpipe", "limit": 4,
    "sketch": 0.75, "threshold": True, "delay": 2,
}  # fmt: skip


def otherwise(option, default):
    """Return a value that is not this default; the gradients' format has different ones."""
    if option == "gradients":
        return {"e4m3": "e5m2", "e5m2": "e4m3"}[default]
    return OTHERWISE[option]


@pytest.mark.thorough
def test_the_options_of_every_choice_are_read_again(tmp_path):
    path = tmp_path / "config.toml"
    for kind, name, options in every_choice():
        cls = CHOSEN[kind][name].options
        config = object.__new__(TrainConfig)  # whether they fit the rest of a run is not asked here
        vars(config).update(vars(TrainConfig()))
        vars(config).update({kind: name, "options": {} if cls is None else {kind: cls(**options)}})
        path.write_text(as_toml(config))
        read = read_settings(path)
        assert read[kind] == name
        assert read.get("options", {}).get(kind, {}) == options
        flags = flags_of(TrainConfig(), read)
        assert options_of(flags.options).get(kind, {}) == options


def test_a_choice_is_a_name_or_a_table(tmp_path):
    path = tmp_path / "run.toml"
    assert 'compress = "none"\n' in as_toml(TrainConfig())
    assert 'dispatch = "all-to-all"\n' in as_toml(TrainConfig())  # it has options, and none is set
    config = TrainConfig(dp=2, compress="powersgd", options={"compress": {"rank": 2}})
    assert as_toml(config).endswith('\n[compress]\nname = "powersgd"\nrank = 2\nwarmup = 0\n')
    for content, options in [
        ('dp = 2\ncompress = "powersgd"', {"rank": 4, "warmup": 0}),
        ('dp = 2\n[compress]\nname = "powersgd"\nrank = 2', {"rank": 2, "warmup": 0}),
    ]:
        path.write_text(content)
        read = config_of(flags_of(TrainConfig(), read_settings(path)), TrainConfig)
        assert (read.compress, vars(read.options["compress"])) == ("powersgd", options)
    path.write_text("dp = 2\nep = 2\nmoe = 2\n[dispatch]\nnode_size = 2")  # of the default
    read = config_of(flags_of(TrainConfig(), read_settings(path)), TrainConfig)
    assert (read.dispatch, read.options["dispatch"].node_size) == ("all-to-all", 2)


def test_flags_win_over_a_files_choice_and_over_its_options(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('dp = 2\n[compress]\nname = "powersgd"\nrank = 2\nwarmup = 3')

    def given(*argv):
        flags = flags_of(TrainConfig(), read_settings(path), argv).options
        return options_of(flags).get("compress")

    assert given() == {"rank": 2, "warmup": 3}
    assert given("--compress", "powersgd") == {"rank": 2, "warmup": 3}
    assert given("--compress", "topk") == {"warmup": 0, "fraction": 0.01}
    assert given("--compress=none") is None
    with pytest.raises(ValueError, match="--compress.fraction is for compress=tagc or topk, and compress=po"):
        given("--compress.fraction", "0.1")


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
        ("[compress]\nrank = 2", "run.toml: compress.rank: compress=none has no options; leave it out"),
        ('[compress]\nname = "powersgd"\nrnk = 2', "run.toml: compress.rnk is no option; use compress.rank"),
        ('[compress]\nname = "powersgd"\nrank = "2"', "run.toml: compress.rank='2' is a str; use a whole"),
        ('[compress]\nname = "powersdg"', "did you mean powersgd? (of the package minipar)"),
        ('compress = "powersdg"', "did you mean powersgd? (of the package minipar)"),
        ("compress = 3", "compress=3 is a int; use a word"),
        ("[options.compress]\nrank = 2", "options is no setting"),
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
