"""The choice of a transport: by the backend, the system, or the environment variable MINIPAR_TRANSPORT."""

from __future__ import annotations

import os

from minipar.comm.checked import CheckedGrouped
from minipar.comm.grouped import Grouped
from minipar.comm.shared_memory import Shared
from minipar.comm.transport import Tagged, Transport
from minipar.errors import one_of

VARIABLE = "MINIPAR_TRANSPORT"
TRANSPORTS = ("tagged", "shared", "grouped")


def choose_transport(backend: str) -> type[Transport]:
    """Return the transport for a backend of torch's, unless the variable says otherwise: it must then do so on all ranks.

    shared   for gloo on Linux: large messages between ranks of one machine go through shared memory
    tagged   for gloo elsewhere: every message goes through gloo
    grouped  for NCCL; on gloo it runs a program by NCCL's rules, and refuses what breaks them

    Raises ValueError for another name than those of TRANSPORTS, and for tagged or shared on NCCL.
    """
    nccl = "nccl" in backend
    on_gloo = "shared" if hasattr(os, "memfd_create") else "tagged"
    name = os.environ.get(VARIABLE) or ("grouped" if nccl else on_gloo)
    if name not in TRANSPORTS:
        raise ValueError(f"{VARIABLE}={name!r} is unknown; use {one_of(TRANSPORTS)}")
    if nccl:
        if name != "grouped":
            raise ValueError(
                f"{VARIABLE}={name!r} needs gloo, as NCCL has no tags; use grouped, or backend='gloo'"
            )
        return Grouped
    return {"tagged": Tagged, "shared": Shared, "grouped": CheckedGrouped}[name]
