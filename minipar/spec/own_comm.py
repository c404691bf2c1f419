"""Checks on a small Comm made of isend and irecv, such as minipar.simple's or a learner's, in place of the library's.

The small Comm runs in the ranks' processes. Each wait for a message has a deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from minipar.comm.transport.traffic import Traffic
from minipar.spec.counted import tell
from minipar.spec.from_file import FromFile, Implementation, OnComm

WAIT_S = 20


def on_comm(comm_class: type | FromFile, implementation: Implementation | FromFile) -> OnComm:
    """Return the implementation, to be checked on Comms of this class, which is made as comm_class(ranks)."""
    return OnComm(implementation, partial(_entered, comm_class))


def _wait(work: Any, doing: str) -> None:
    """Wait for a message; if it never comes, raise a plainer error than gloo's."""
    try:
        work.wait(timedelta(seconds=WAIT_S))
    except RuntimeError as error:
        if "imed out" in str(error):
            raise TimeoutError(f"deadlock: it waited {WAIT_S} s {doing}, which did not do its part") from None
        raise ConnectionError(
            f"it waited {doing}, which gave up or ended: a message has no counterpart"
        ) from None


@contextmanager
def _entered(comm_class: Any, world: Any) -> Iterator[Any]:
    if isinstance(comm_class, FromFile):
        comm_class = comm_class.load()
    group = world.process_group()
    isend, irecv = dist.isend, dist.irecv

    def sending(x: Any, dst: int, **tag: int) -> SimpleNamespace:
        if x.nbytes:
            tell("send", [(dst, x.nbytes)])
        return SimpleNamespace(
            wait=partial(_wait, isend(x, dst, group=group, **tag), f"to send to rank {dst}")
        )

    def receiving(x: Any, src: int, **tag: int) -> SimpleNamespace:
        return SimpleNamespace(
            wait=partial(_wait, irecv(x, src, group=group, **tag), f"to receive from rank {src}")
        )

    # `using` chooses an algorithm; a small Comm has only one.
    extra = {
        "traffic": Traffic(),
        "using": lambda self, algorithm: self,
        "_transport": SimpleNamespace(post=None),
    }
    with patch.object(dist, "isend", sending), patch.object(dist, "irecv", receiving):
        yield type("OwnComm", (comm_class,), extra)(range(world.size))
