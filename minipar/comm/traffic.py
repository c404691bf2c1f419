"""The ledger of what this rank has handed to the transport."""

from __future__ import annotations

import threading
from collections import Counter


class Traffic:
    """Bytes and messages this rank has sent through one Comm, and through every subgroup made from it.

    sent_bytes   payload bytes handed to the transport (received bytes are the other rank's sent ones)
    messages     how many sends carried them; an empty tensor is not a message
    by_kind      bytes by the operation that sent them: "all_reduce", "send", "exchange", ..., "native"

    Booked where a message leaves, in `Comm`, never computed from a formula: so a test can hold it against one.
    """

    def __init__(self, parent: Traffic | None = None):
        self._parent = parent
        self._lock = threading.Lock()  # streams of several subgroups book on the same parent
        self.reset()

    def reset(self) -> None:
        self.sent_bytes = 0
        self.messages = 0
        self.by_kind: Counter[str] = Counter()

    def book(self, kind: str, num_bytes: int) -> None:
        with self._lock:
            self.sent_bytes += num_bytes
            self.messages += 1
            self.by_kind[kind] += num_bytes
        if self._parent is not None:
            self._parent.book(kind, num_bytes)

    def __repr__(self):
        kinds = ", ".join(f"{kind} {num_bytes}" for kind, num_bytes in self.by_kind.items())
        return f"Traffic({self.sent_bytes} bytes in {self.messages} messages: {kinds or 'nothing sent'})"
