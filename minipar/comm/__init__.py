"""Ranks, messages and collectives. In reading order:

communicator.py      Comm: rank, size, send, recv, exchange, subgroup, and the collectives as methods
transport.py         sends and receives with tags, deadlines and counts, over gloo
messages.py          Message, Channel, and Traffic, the count of bytes sent
stream.py            the stream that runs a Comm's operations in call order, and the handle of an asynchronous one
collectives.py       the algorithms of each collective, and the one that "auto" chooses
reduction.py         the reduction operators, and the step that every reduction repeats
ring.py              reduce-scatter, all-gather, all-reduce, broadcast and reduce around a ring
halving_doubling.py  reduce-scatter, all-gather and all-reduce in log p steps
tree.py              broadcast, reduce and all-reduce along a binomial tree
pairwise.py          all-to-all
hierarchical.py      all-reduce in two levels: inside nodes and across them
barrier.py           the dissemination barrier
objects.py           gathering Python values
native.py            torch's own collectives on the same ranks
autograd.py          collectives with their adjoints as backward
diagnosis.py         deadlocks and lost messages, explained from all ranks' message counts
existing_group.py    a world on an existing process group
grouped.py           the NCCL transport
cuda_stream.py       the stream on CUDA
"""

from minipar.comm.communicator import Comm
from minipar.comm.messages import PeerLost, Traffic

__all__ = ["Comm", "PeerLost", "Traffic"]
