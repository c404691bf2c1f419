"""`minipar plan --view`: the options of a view are flags by the same rule as those of what a run chooses."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import minipar.cost.plan_command as work
from minipar.cli import main
from minipar.support.options import option
from minipar.support.registry import Choice, Kind


@dataclass(frozen=True)
class SplitOptions:
    """Of a view."""

    pieces: str = option("auto", "how it is cut")
    num_parts: int = option(2, "how often")


@pytest.fixture
def planned(monkeypatch):
    """The view and its options as the work of the command gets them."""
    seen = []

    def plan_command(*job, view, view_options, **layout):
        seen.append((view, view_options))
        return SimpleNamespace(text="", job=None, layouts=[], plan=None)

    views = {"split": Choice(help="by parts", options=SplitOptions), "bare": Choice(help="nothing to set")}
    monkeypatch.setattr(work, "VIEWS", Kind("view", views))
    monkeypatch.setattr(work, "plan_command", plan_command)
    return seen


def test_a_views_options_are_flags(planned):
    main(["plan"])
    main(["plan", "--view", "bare"])
    main(["plan", "--view", "split", "--view.num-parts", "3"])
    assert planned == [("", {}), ("bare", {}), ("split", {"pieces": "auto", "num_parts": 3})]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--view", "spilt"], "view='spilt' is unknown; use split, bare, "),
        (["--view", "bare", "--view.pieces", "x"], "--view.pieces is for view=split, and view=bare"),
        (["--view.pieces", "x"], "--view.pieces is for view=split, and --view is not given"),
        (["--view", "split", "--view.peices", "x"], "did you mean --view.pieces?"),
        (["--help", "veiw"], "--help veiw: no such topic; use view"),
    ],
)
def test_what_is_wrong_is_one_line(planned, capsys, argv, says):
    with pytest.raises(SystemExit) as left:
        main(["plan", *argv])
    err = capsys.readouterr().err
    assert (left.value.code, err.count("\n"), planned) == (2, 1, [])
    assert says in err


def test_help_view_lists_the_views(planned, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help", "view"])
    out = " ".join(capsys.readouterr().out.split())
    assert "split by parts --view.pieces STR how it is cut (default: auto)" in out
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert capsys.readouterr().out.endswith("minipar plan --help TOPIC shows more: view.\n")
    with pytest.raises(SystemExit):
        main(["plan", "--help-all"])
    assert out in " ".join(capsys.readouterr().out.split())
