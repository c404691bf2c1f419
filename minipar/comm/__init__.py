"""Ranks, messages and collectives. In reading order:

communicator.py      Comm: rank, size, send, recv, exchange, subgroup, and the collectives as methods
transport.py         handing messages over: tags, deadlines, counts
messages.py          a message, its channel, and the ledger of bytes
stream.py            why a Comm's operations run in one order, and the handle of an asynchronous one
collectives.py       the algorithms of each collective, and the choice of "auto"
reduction.py         the step of which every reduction is made
ring.py              reduce-scatter, all-gather and all-reduce around a ring
halving_doubling.py  the same in log p steps
tree.py              broadcast and reduce down and up a binomial tree
pairwise.py          all-to-all
hierarchical.py      all-reduce inside nodes, then across them
barrier.py           the dissemination barrier
native.py            torch's own collectives on the same ranks
autograd.py          collectives with their adjoints as backward
diagnosis.py         deadlocks and lost messages, explained from all ranks' counts
adopt.py             a world on somebody else's process group
grouped.py           the transport of NCCL
cuda_stream.py       the stream on CUDA
"""

from minipar.comm.communicator import Comm
from minipar.comm.messages import PeerLost, Traffic

__all__ = ["Comm", "PeerLost", "Traffic"]
