"""What `minipar train --help` shows: at most 40 flags, mesh first; every other flag by a topic, and all by --help-all."""

import re
from dataclasses import fields

import pytest

from minipar.cli import main
from minipar.cli.choices import as_flag
from minipar.cli.flags import HEADINGS
from minipar.config.choices import CHOSEN
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig

GROUPS = [name for name in HEADINGS if name != "mixture"]
TOPICS = [*GROUPS, *(as_flag(name)[2:] for name in CHOSEN)]
# A bool has two forms on one line; `--compress NAME:` begins the page of a kind.
FLAG = re.compile(r"^[│ ]*(--[a-z][\w.-]*)", re.MULTILINE)


@pytest.fixture
def help_of(capsys, monkeypatch):
    """The help of these words of a command, and the flags in it in order."""
    monkeypatch.setenv("COLUMNS", "100")

    def show(*argv):
        with pytest.raises(SystemExit) as left:
            main([*argv])
        out, err = capsys.readouterr()
        assert (left.value.code, err) == (0, ""), argv
        return out, FLAG.findall(out)

    return show


def every_flag() -> set[str]:
    own = {as_flag(f.name) for f in fields(TrainConfig) if f.name not in ("model", "options")}
    model = {as_flag(f"model.{f.name}") for f in fields(ModelConfig)}
    options = {
        as_flag(f"{kind}.{f.name}")
        for kind, choices in CHOSEN.items()
        for choice in choices.usable().values()
        if choice.options is not None
        for f in fields(choice.options)
    }
    return own | model | options


@pytest.mark.parametrize("command", ["train", "verify"])
def test_help_shows_40_flags_at_most(help_of, command):
    _, flags = help_of(command, "--help")
    assert 20 < len(set(flags)) <= 40
    assert "--help" not in flags  # stands behind -h
    assert len(set(flags)) == len(flags)


def test_mesh_is_first_then_model_data_and_run(help_of):
    text, flags = help_of("train", "--help")
    assert flags[:7] == ["--dp", "--pp", "--cp", "--ep", "--tp", "--zero", "--schedule"]
    places = [text.index(f"{group} options") for group in ("mesh", "model", "data", "run")]
    assert places == sorted(places)
    assert {"--steps", "--seed", "--text", "--out", "--dtype", "--compress", "--model.dim"} <= set(flags)


def test_help_ends_with_its_topics(help_of):
    text, _ = help_of("train", "--help")
    topics = ", ".join(TOPICS)
    last = f"minipar train --help TOPIC shows more: {topics}; minipar train --help-all shows everything."
    assert " ".join(text.split()).endswith(last)


def test_every_flag_is_shown_by_a_topic(help_of):
    seen = {flag for topic in TOPICS for flag in help_of("train", "--help", topic)[1]}
    assert every_flag() <= seen
    assert len(every_flag()) > 90


@pytest.mark.parametrize("command", ["train", "verify"])
def test_help_all_shows_every_flag(help_of, command):
    assert every_flag() <= set(help_of(command, "--help-all")[1])


@pytest.mark.parametrize("kind", CHOSEN)
def test_the_page_of_a_kind_says_what_each_choice_is(help_of, kind):
    text, flags = help_of("train", "--help", as_flag(kind)[2:])
    own = {name: choice.help for name, choice in CHOSEN[kind].usable().items()}
    plain = " ".join(text.split())
    for name, help in own.items():
        brought = f" (package {CHOSEN[kind].extras()[name]})" if name in CHOSEN[kind].extras() else ""
        assert help, name
        assert f" {name} {help}{brought}" in plain, name
    options = {f.name for c in CHOSEN[kind].usable().values() if c.options for f in fields(c.options)}
    assert set(flags[1:]) == {as_flag(f"{kind}.{name}") for name in options}


def test_a_topic_shows_its_own_flags_alone(help_of):
    _, flags = help_of("train", "--help", "precision")
    named = [as_flag(f.name) for f in fields(TrainConfig) if f.metadata.get("group") == "precision"]
    assert flags == named
    _, flags = help_of("verify", "-h", "model")
    own = {flag for flag in flags if flag not in ("--all", "--world-size")}
    assert own == {as_flag(f"model.{f.name}") for f in fields(ModelConfig)} | {"--moe"}


def test_the_flags_have_their_help(help_of):
    text, _ = help_of("train", "--help-all")
    plain = " ".join(text.replace("│", " ").split())
    for f in (*fields(TrainConfig), *fields(ModelConfig)):
        assert f.metadata["help"], f.name
        if f.name not in ("model", "options"):
            assert f.metadata["help"] in plain, f.name


def test_completion_knows_every_flag_and_choice(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--tyro-print-completion", "bash"])
    script = capsys.readouterr().out
    assert not left.value.code
    words = set(re.findall(r"[\w.-]+", script))
    assert {flag for flag in every_flag() if flag not in words} == set()
    for choices in CHOSEN.values():
        assert set(choices) <= words
