"""Kinds of choices, when no package brings any, and when another one does."""

from importlib.metadata import entry_points

import pytest

from minipar.schedules.registry import SCHEDULES
from minipar.support.registry import GROUP, Choice, Kind
from tests.support.packages import install


def test_a_kind_without_choices_refuses_every_name():
    kind: Kind[Choice] = Kind("no such kind", {})
    assert list(kind) == []
    with pytest.raises(
        ValueError, match="^no such kind='x' is unknown; no package that is installed brings one$"
    ):
        kind["x"]


def test_these_tests_count_the_extras_of_minipar_alone(tmp_path, monkeypatch):
    """With another package installed, the sweep that README counts had 624 meshes in place of 552."""
    install(tmp_path, "stranger", {"schedule.lifo": "stranger:LIFO"})
    monkeypatch.syspath_prepend(tmp_path)
    assert "schedule.lifo" in entry_points(group=GROUP).names
    assert "lifo" not in SCHEDULES
    assert "v-min" in SCHEDULES
