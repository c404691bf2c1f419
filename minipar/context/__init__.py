"""Context parallelism: one sequence split over ranks, because its activations do not fit on one. In reading order:

token_layout.py    layouts: the tokens that each rank holds, contiguous, zigzag or striped
documents.py       several documents in one sample, and documents dealt out to ranks by what they cost
all_gather.py      every rank all-gathers keys and values
attention_ring.py  keys and values are sent around a ring
ulysses.py         each rank gets all tokens of some heads, by all-to-all
usp.py             Ulysses inside nodes, ring attention across nodes
parallelize_context.py  `context_parallel`: replaces the attention core of a model by one of these
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
