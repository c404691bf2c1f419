"""A connection of uvicorn that ends clients which keep it waiting, and tells its own errors as JSON."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from minipar.extras.http.bodies import error_body


class Connection(H11Protocol):
    """uvicorn's protocol, with a limit on open connections, and a deadline for a request's headers and one for its body."""

    max_connections = 512
    request_s = 30.0
    max_dropped = (
        1 << 22
    )  # bytes of a body that was refused; most clients read an answer only once they have sent all
    _dropped = 0
    _waits_for: type | None = None
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(
                "503 Service Unavailable", f"{self.max_connections} connections are open; try again later"
            )
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._dropped += len(data)
            if self._dropped > self.max_dropped:
                self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._restart(False)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg)

    def _watch(self) -> None:
        """Start the deadline anew where the client begins to owe headers or a body, and end it where it owes nothing."""
        if self.conn.their_state is not self._waits_for:
            self._waits_for = self.conn.their_state
            self._restart(self._waits_for in (h11.IDLE, h11.SEND_BODY))

    def _restart(self, is_owed: bool) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.request_s, self._expire) if is_owed else None

    def _expire(self) -> None:
        self._refuse("408 Request Timeout", f"the request was not sent within {self.request_s:g} s")

    def _refuse(self, status: str, why: str) -> None:
        """Close the connection, with an answer where none has begun."""
        kind = "server_error" if status.startswith("5") else "invalid_request_error"
        body = json.dumps(error_body(why, kind))
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        more = "retry-after: 1\r\n" if kind == "server_error" else ""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(f"{head}{more}connection: close\r\n\r\n{body}".encode())
        self.transport.close()
