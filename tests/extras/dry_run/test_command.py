"""`minipar train --dry-run` reports, and starts nothing."""

import pytest

from minipar.cli import main

RUN = "train --dp 2 --model.num-layers 1 --model.dim 32 --seq-len 16 --batch-size 4"


def test_the_command_reports_and_starts_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main([*RUN.split(), "--dry-run", "--memory", "80"])
    said = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    assert "What a rank holds, and sends in a step: ranks parameters gradients states" in said
    assert "dp2 would run: each of" in said
    assert "of 80 GB at the worst moment of a step" in said
    assert list(tmp_path.iterdir()) == []


def test_a_mesh_that_does_not_fit_exits_with_1(capsys):
    with pytest.raises(SystemExit) as left:
        main([*RUN.split(), "--dry-run", "--memory", "0.0001"])
    assert left.value.code == 1
    assert "dp2 DOES NOT FIT: ranks 0-1 need up to" in capsys.readouterr().out


def test_its_options_are_refused_without_it(capsys):
    for words, flag in ((["--memory", "80"], "--memory"), (["--by-kind"], "--by-kind")):
        with pytest.raises(SystemExit) as left:
            main([*RUN.split(), *words])
        out, err = capsys.readouterr()
        assert (left.value.code, out) == (2, "")
        assert err == f"minipar: {flag} is an option of --dry-run; use that, too, or leave it out\n"


def test_its_flags_are_in_the_help_and_in_completion(capsys):
    flags = {"--dry-run", "--by-kind", "--memory"}
    for words in ("train --help run", "train --help-all", "--tyro-print-completion bash"):
        with pytest.raises(SystemExit):
            main(words.split())
        shown = capsys.readouterr().out
        assert {flag for flag in flags if flag not in shown} == set(), words
    for words, shows in (("train --help", True), ("train --help precision", False)):
        with pytest.raises(SystemExit):
            main(words.split())
        assert ("--dry-run" in capsys.readouterr().out) is shows, words
