"""A rank's membership in a group: messages to its other members, and the functions of collectives.py as methods.

    comm.rank, comm.size                          this rank's number in the group, 0 <= rank < size
    comm.send(x, to)                              send a tensor to rank `to`
    comm.recv(shape, dtype, source)               receive a tensor of that shape from rank `source`
    comm.exchange(x, to, shape, dtype, source)    both at once: two ranks that exchange cannot wait for each other
    comm.subgroup(ranks, name)                    the Comm of some of these ranks, which must include this one

A message is torch.distributed's isend on one rank and irecv on the other, over gloo, in CPU memory. With async_op=True a
call returns at once, and the handle's wait() returns the result. Every wait has a deadline, `timeout_s` of launch.run.

In the library: minipar.Comm, which adds GPUs, other algorithms, byte counts, and names the ranks of a deadlock.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from zlib import crc32

import torch
import torch.distributed as dist

from . import collectives


class Collectives:
    def all_reduce(self, x, op="sum", async_op=False):
        return self._run(async_op, _reduced, collectives.all_reduce, op, x)

    def reduce_scatter(self, x, op="sum", async_op=False):
        return self._run(async_op, _reduced, collectives.reduce_scatter, op, x)

    def all_gather(self, x, async_op=False):
        return self._run(async_op, collectives.all_gather, x)

    def broadcast(self, x, root=0):
        return self._run(False, collectives.broadcast, x, root)

    def all_to_all(self, x, send_sizes=None, recv_sizes=None):
        equal = [len(x) // self.size] * self.size
        return self._run(False, collectives.all_to_all, x, send_sizes or equal, recv_sizes or equal)

    def _run(self, async_op, collective, *args):
        """Run the collective in a thread, after the collectives that this group has called before."""
        if not hasattr(self, "thread"):
            self.thread = ThreadPoolExecutor(1)
        future = self.thread.submit(torch.no_grad()(collective), self, *args)
        return SimpleNamespace(wait=future.result) if async_op else future.result()


def _reduced(comm, collective, op, x):
    total = collective(comm, x, torch.maximum if op == "max" else torch.add)
    return total / comm.size if op == "mean" else total


class Comm(Collectives):
    device = torch.device("cpu")

    def __init__(self, ranks, name="world"):
        self.ranks, self.name = tuple(ranks), name  # ranks in the world, which isend and irecv take
        if dist.get_rank() not in self.ranks:
            raise ValueError(f"rank {dist.get_rank()} is not in the group {name}, {self.ranks}")
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        # Each message carries its group's tag, so that no group receives another group's. Making a group sends nothing.
        self.tag = crc32(f"{name} {self.ranks}".encode()) >> 1

    def subgroup(self, ranks, name):
        return type(self)([self.ranks[r] for r in ranks], f"{self.name}/{name}")

    def send(self, x, to, async_op=False):
        sending = dist.isend(x.detach().contiguous(), self.ranks[to], tag=self.tag)
        return sending if async_op else sending.wait()

    def recv(self, shape, dtype, source):
        x = torch.empty(shape, dtype=dtype)
        dist.irecv(x, self.ranks[source], tag=self.tag).wait()
        return x

    def exchange(self, x, to, shape, dtype, source):
        if to == source == self.rank:
            return x.detach().clone()
        sending = self.send(x, to, async_op=True)
        received = self.recv(shape, dtype, source)
        sending.wait()
        return received
