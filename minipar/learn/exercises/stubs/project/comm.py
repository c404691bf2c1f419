"""A group of ranks, and its messages, over torch.distributed's isend and irecv.

    dist.isend(x, 3, tag=7)     starts to send a contiguous tensor to world rank 3; .wait() returns when it is sent
    dist.irecv(x, 2, tag=7)     starts to receive into x from world rank 2; .wait() returns when it is received
    dist.get_rank()             this process's rank in the world

A receive takes only messages with its own tag. So give each group its own tag, made from its name and ranks, for example
zlib.crc32(...) % 2**31 (a tag must be below 2**31), so that no group receives another group's messages.

Checked: a shift, a broadcast and a pipeline that use this Comm, on one to four ranks, and the bytes that they send.
"""

import torch
import torch.distributed as dist

from minipar.simple.comm import Collectives  # all_reduce, ... as methods; they call exchange, send and recv


class Comm(Collectives):
    """A group of ranks. `ranks`: its members' world ranks; self.rank and self.size are relative to this group."""

    device = torch.device("cpu")

    def __init__(self, ranks, name="world"):
        raise NotImplementedError

    def subgroup(self, ranks, name):
        """Return the Comm of these ranks, numbered within this group. Groups with different names are distinct."""
        raise NotImplementedError

    def send(self, x, to, async_op=False):
        """Send x to rank `to` of this group. With async_op=True return a handle at once, which has a wait()."""
        raise NotImplementedError

    def recv(self, shape, dtype, source):
        """Return a tensor of this shape and dtype, received from rank `source` of this group."""
        raise NotImplementedError

    def exchange(self, x, to, shape, dtype, source):
        """Send x to rank `to` and return what rank `source` sent. A rank may exchange with itself: to == source == rank."""
        raise NotImplementedError
