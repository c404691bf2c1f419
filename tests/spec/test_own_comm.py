"""A small Comm of isend and irecv: each wait has a deadline, and says what it waited for."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from minipar.spec.own_comm import _wait


@pytest.mark.parametrize(
    ("gloo_says", "kind", "words"),
    [
        ("Timed out waiting 20000ms for recv", TimeoutError, "deadlock: it waited 20 s to receive from"),
        ("Connection closed by peer", ConnectionError, "it waited to receive from rank 1, which gave up"),
    ],
)
def test_a_wait_is_as_long_as_its_words_say(gloo_says, kind, words):
    given = []

    def wait(limit):
        given.append(limit)
        raise RuntimeError(gloo_says)

    with pytest.raises(kind, match=words):
        _wait(SimpleNamespace(wait=wait), "to receive from rank 1")
    assert given == [timedelta(seconds=20)]
