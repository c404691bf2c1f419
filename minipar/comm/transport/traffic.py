"""The count of bytes that a rank has sent."""

from __future__ import annotations

import threading
from collections import Counter


class Traffic:
    """Bytes and messages that this rank has sent through one Comm and all its subgroups.

    sent_bytes   payload bytes (received bytes are counted by the rank that sent them)
    messages     number of sends; an empty tensor is not sent
    by_kind      bytes by the operation that sent them: "all_reduce", "send", "exchange", ..., "native"

    Bytes are counted when a message is posted, never computed from a formula, so that tests can compare them with one.
    """

    def __init__(self, parent: Traffic | None = None):
        self._parent = parent
        self._lock = threading.Lock()  # the streams of several subgroups update the same parent
        self.reset()

    def reset(self) -> None:
        self.sent_bytes = 0
        self.messages = 0
        self.by_kind: Counter[str] = Counter()

    def book(self, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Count messages that have `num_bytes` together."""
        with self._lock:
            self.sent_bytes += num_bytes
            self.messages += messages
            self.by_kind[kind] += num_bytes
        if self._parent is not None:
            self._parent.book(kind, num_bytes, messages)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {num_bytes}" for kind, num_bytes in self.by_kind.items())
        return f"Traffic({self.sent_bytes} bytes in {self.messages} messages: {kinds or 'nothing sent'})"
