"""The choices "double_tree" and "bruck" of `--algorithm`. Imports no torch."""

from minipar.support.registry import Choice

DOUBLE_TREE = Choice(
    "minipar.extras.collectives.double_tree:ALGORITHM", "two binary trees at once, in segments"
)
BRUCK = Choice("minipar.extras.collectives.bruck:ALGORITHM", "all-to-all in log p messages")
