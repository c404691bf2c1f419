"""`minipar puzzle`: list, show, start, check, hints and answer."""

import pytest

from minipar.cli import main
from minipar.learn.puzzles.registry import PUZZLES


def test_the_list_names_all(capsys):
    main(["puzzle", "list"])
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in PUZZLES)


def test_a_puzzle_is_started_once_and_checked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["puzzle", "start", "ring"])
    with pytest.raises(SystemExit, match="2"):
        main(["puzzle", "start", "ring"])
    assert "ring.py exists already" in capsys.readouterr().err
    for source, code, words in (
        (PUZZLES["ring"].stub, 1, "line 6: this is where your program goes"),
        (f"{PUZZLES['ring'].answer}print('read')\n", 0, "rank 0, line 13: read\n"),
        (PUZZLES["ring"].answer, 0, "next: `minipar puzzle show halves`"),
    ):
        (tmp_path / "ring.py").write_text(source)
        with pytest.raises(SystemExit) as left:
            main(["puzzle", "check", "ring"])
        assert left.value.code == code
        assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("action", "words"),
    [("show", "in a **ring**"), ("show", "alpha = 10 us"), ("hints", "3. "), ("answer", "for step in range")],
)
def test_texts_are_shown(capsys, action, words):
    main(["puzzle", action, "ring"])
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["check", "ring", "nowhere.py"], "cannot be read"), (["show", "rin"], "did you mean ring")],
)
def test_a_bad_request_is_one_line(capsys, argv, words):
    with pytest.raises(SystemExit, match="2"):
        main(["puzzle", *argv])
    assert words in capsys.readouterr().err
