"""Ranks and collectives, from send and receive alone. In reading order:

point_to_point.py    a group of ranks: rank, size, send, recv, exchange, subgroup
reduction.py         the reduction operators, and the step that every reduction repeats
ring.py              reduce-scatter, all-gather and all-reduce around a ring
ring_with_root.py    broadcast and reduce of long vectors
halving_doubling.py  reduce-scatter, all-gather and all-reduce in log p steps
tree.py              broadcast, reduce and all-reduce along a binomial tree
pairwise.py          all-to-all
hierarchical.py      all-reduce, reduce-scatter and all-gather in two levels: inside nodes and across them
native.py            torch's own collectives
barrier.py           the dissemination barrier
collectives.py       the algorithms of each collective, and the one that "auto" chooses
communicator.py      Comm: a group of ranks, with the collectives as methods
repeated.py          a forward repeated without its messages, for activation checkpointing
host.py              a Comm of the same ranks for tensors on the CPU
objects.py           gathers and broadcasts Python values
agreement.py         values that must be equal on all ranks
autograd.py          collectives with their adjoints as backward

`minipar.comm.transport` moves the bytes; `minipar.extras.collectives` has further algorithms.
"""

from minipar.comm.communicator import Comm
from minipar.comm.transport.errors import PeerLost
from minipar.comm.transport.traffic import Traffic

__all__ = ["Comm", "PeerLost", "Traffic"]
