"""Kinds of choices, when no package brings any."""

import pytest

from minipar.support.registry import Choice, Kind


def test_a_kind_without_choices_refuses_every_name():
    kind: Kind[Choice] = Kind("no such kind", {})
    assert list(kind) == []
    with pytest.raises(
        ValueError, match="^no such kind='x' is unknown; no package that is installed brings one$"
    ):
        kind["x"]
