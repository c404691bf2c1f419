"""Ranks, messages and collectives. In reading order:

communicator.py      Comm: rank, size, send, recv, exchange, subgroup, and the collectives as methods
transport.py         the contract of the transports, with deadlines and counts; and the tagged one, for gloo
messages.py          Message, Channel, and Traffic, the count of bytes sent
stream.py            the stream that runs a Comm's operations in call order, and the handle of an asynchronous one
collectives.py       the algorithms of each collective, and the one that "auto" chooses
reduction.py         the reduction operators, and the step that every reduction repeats
ring.py              reduce-scatter, all-gather, all-reduce, broadcast and reduce around a ring
halving_doubling.py  reduce-scatter, all-gather and all-reduce in log p steps
tree.py              broadcast, reduce and all-reduce along a binomial tree
double_tree.py       all-reduce along two binary trees at once, in segments
pairwise.py          all-to-all
bruck.py             all-to-all in log p messages
hierarchical.py      all-reduce, reduce-scatter and all-gather in two levels: inside nodes and across them
barrier.py           the dissemination barrier
objects.py           gathering Python values
native.py            torch's own collectives on the same ranks
autograd.py          collectives with their adjoints as backward
diagnosis.py         deadlocks and lost messages, explained from all ranks' message counts
existing_group.py    a world on an existing process group
shared_memory.py     the shared one, on one machine: what is exchanged in rings and halving never passes a socket
grouped.py           the grouped transport, for NCCL: a communicator per Comm, messages matched by order alone
checked.py           the same on gloo, which refuses what NCCL would hang on or cross
transports.py        the choice between them: by the backend, or by MINIPAR_TRANSPORT
watch.py             deadlines on a GPU, for which the host does not wait
cuda_stream.py       the stream on CUDA
cuda_trace.py        spans in a GPU's time
host.py              the same ranks with tensors on the CPU
"""

from minipar.comm.communicator import Comm
from minipar.comm.messages import PeerLost, Traffic

__all__ = ["Comm", "PeerLost", "Traffic"]
