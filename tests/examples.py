"""How many examples a property draws where the profile's number does not suit it.

`make test` draws a fifth of each, `make test-all` all, `make slow` eight times as many (the profiles of conftest.py).
"""

from typing import Any

from hypothesis import settings

ALL = 25  # examples that a property draws by default in `make test-all`


def examples(number: int, **others: Any) -> settings:
    """Return the settings of a property that draws this number of examples, scaled by the profile; at least two."""
    return settings(max_examples=max(2, number * settings().max_examples // ALL), **others)
