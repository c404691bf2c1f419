"""How ranks talk. In reading order:

communicator.py      Comm: rank, size, send, recv, exchange, subgroup
link.py              one process's end of the world: transport, tags, deadlines, the account of messages
stream.py            why a Comm's operations run in one order, and what an asynchronous one returns
traffic.py           the ledger of bytes sent
chunks.py            how a tensor is cut among ranks
segments.py          the step of which every reduction is made
ring.py              reduce-scatter, all-gather and all-reduce around a ring
halving_doubling.py  the same in log p steps
tree.py              broadcast and reduce down and up a binomial tree
pairwise.py          all-to-all
hierarchical.py      all-reduce inside nodes, then across them
collectives.py       the methods of Comm that choose among these
differentiable.py    collectives with their adjoints as backward
"""

from minipar.comm.communicator import Comm
from minipar.comm.link import PeerLost
from minipar.comm.traffic import Traffic

__all__ = ["Comm", "PeerLost", "Traffic"]
