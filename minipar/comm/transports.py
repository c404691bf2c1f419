"""The choice of a transport: by the backend, or by the environment variable MINIPAR_TRANSPORT."""

from __future__ import annotations

import os

from minipar.comm.checked import CheckedGrouped
from minipar.comm.grouped import Grouped
from minipar.comm.transport import Tagged, Transport
from minipar.errors import one_of

VARIABLE = "MINIPAR_TRANSPORT"
TRANSPORTS = ("tagged", "grouped")


def choose_transport(backend: str) -> type[Transport]:
    """Return the transport for a backend of torch's: tagged for gloo, grouped for NCCL, unless the variable says otherwise.

    MINIPAR_TRANSPORT=grouped runs a program on gloo by NCCL's rules, and refuses what breaks them.
    Raises ValueError for another name than those of TRANSPORTS, and for tagged on NCCL.
    """
    nccl = "nccl" in backend
    name = os.environ.get(VARIABLE) or ("grouped" if nccl else "tagged")
    if name not in TRANSPORTS:
        raise ValueError(f"{VARIABLE}={name!r} is unknown; use {one_of(TRANSPORTS)}")
    if nccl:
        if name == "tagged":
            raise ValueError(
                f"{VARIABLE}='tagged' needs gloo, as NCCL has no tags; use grouped, or backend='gloo'"
            )
        return Grouped
    return CheckedGrouped if name == "grouped" else Tagged
