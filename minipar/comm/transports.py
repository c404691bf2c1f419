"""The choice of a transport: by the backend, or by the environment variable MINIPAR_TRANSPORT."""

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
    """Return the transport for a backend of torch's: tagged for gloo, grouped for NCCL, unless the variable says otherwise.

    MINIPAR_TRANSPORT=grouped runs a program on gloo by NCCL's rules, and refuses what breaks them. MINIPAR_TRANSPORT=shared
    sends large messages between ranks of one machine through shared memory; it must be set on all of them.
    Raises ValueError for another name than those of TRANSPORTS, and for tagged or shared on NCCL.
    """
    nccl = "nccl" in backend
    name = os.environ.get(VARIABLE) or ("grouped" if nccl else "tagged")
    if name not in TRANSPORTS:
        raise ValueError(f"{VARIABLE}={name!r} is unknown; use {one_of(TRANSPORTS)}")
    if nccl:
        if name != "grouped":
            raise ValueError(
                f"{VARIABLE}={name!r} needs gloo, as NCCL has no tags; use grouped, or backend='gloo'"
            )
        return Grouped
    return {"tagged": Tagged, "shared": Shared, "grouped": CheckedGrouped}[name]
