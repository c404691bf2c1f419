"""The choice of a transport: by the backend, the system, or the environment variable MINIPAR_TRANSPORT."""

from __future__ import annotations

import os

from minipar.comm.transport.checked import CheckedGrouped
from minipar.comm.transport.grouped import Grouped
from minipar.comm.transport.shared_memory import Shared
from minipar.comm.transport.transport import Tagged, Transport
from minipar.support.errors import one_of

VARIABLE = "MINIPAR_TRANSPORT"
TRANSPORTS = ("tagged", "shared", "grouped")


def choose_transport(backend: str) -> type[Transport]:
    """Return the transport for a backend of torch's, or the one named by MINIPAR_TRANSPORT, which all ranks must set alike.

    shared   for gloo: long and repeated messages between two ranks of a machine go through shared memory, on Linux
    tagged   for gloo: every message goes through gloo
    grouped  for NCCL; on gloo it enforces NCCL's rules: it raises where a program breaks one

    Raises ValueError for a name that is not in TRANSPORTS, and for tagged or shared on NCCL.
    """
    nccl = "nccl" in backend
    name = os.environ.get(VARIABLE) or ("grouped" if nccl else "shared")
    if name not in TRANSPORTS:
        raise ValueError(f"{VARIABLE}={name!r} is unknown; use {one_of(TRANSPORTS)}")
    if nccl:
        if name != "grouped":
            raise ValueError(
                f"{VARIABLE}={name!r} needs gloo, as NCCL has no tags; use grouped, or backend='gloo'"
            )
        return Grouped
    return {"tagged": Tagged, "shared": Shared, "grouped": CheckedGrouped}[name]
