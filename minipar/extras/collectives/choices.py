"""The choice "double_tree" of `--algorithm`. Imports no torch."""

from minipar.support.registry import Choice

DOUBLE_TREE = Choice(
    "minipar.extras.collectives.double_tree:ALGORITHM", "two binary trees at once, in segments"
)
