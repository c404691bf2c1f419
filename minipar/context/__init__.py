"""Context parallelism: one sequence split over ranks, because its activations do not fit on one. In reading order:

layout.py          which tokens a rank holds: contiguous, zigzag, striped
documents.py       several documents in one sample
all_gather.py      every rank collects all keys and values
ring.py           keys and values travel around a ring
ulysses.py         all tokens of a part of the heads, by all-to-all
usp.py             Ulysses inside nodes, the ring across them
apply.py           the model with one of these in place of its attention's core
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
