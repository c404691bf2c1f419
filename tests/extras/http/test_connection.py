"""Connections that keep the server waiting, with the time given by hand; and one, and too many, by real sockets."""

import asyncio
import contextlib
import json

import pytest
import uvicorn
from uvicorn.server import ServerState

from minipar.extras.http.connection import Connection
from minipar.extras.http.live import Desk
from tests.extras.http.clients import app_of, post, serving_app, wait_until, write

BODY = json.dumps(dict(prompt="x", max_tokens=5))
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LATE = "the request was not sent within 30 s"


class Time:
    """An event loop whose timers are run by hand."""

    def __init__(self, loop):
        self._loop, self.now, self._timers = loop, 0.0, []

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def call_later(self, delay, call, *args):
        timer = self._loop.call_later(10_000, call, *args)
        self._timers.append((self.now + delay, timer, lambda: call(*args)))
        return timer

    def passes(self, seconds):
        self.now += seconds
        due = sorted((timer for timer in self._timers if timer[0] <= self.now), key=lambda timer: timer[0])
        self._timers = [timer for timer in self._timers if timer[0] > self.now]
        for _, handle, call in due:
            if not handle.cancelled():
                handle.cancel()
                call()

    def close(self):
        for _, handle, _ in self._timers:
            handle.cancel()


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self, protocol):
        super().__init__()
        self._protocol, self._is_closing, self.written = protocol, False, b""
        protocol.connection_made(self)

    def write(self, data):
        assert not self._is_closing
        self.written += data

    def close(self):
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def is_closing(self):
        return self._is_closing

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Place:
    """A server's side of connections."""

    def __init__(self, desk):
        self.config = uvicorn.Config(app_of(desk), lifespan="off", log_config=None)
        self.time, self.state = Time(asyncio.get_running_loop()), ServerState()

    def connect(self):
        return Wire(Connection(config=self.config, server_state=self.state, app_state={}, _loop=self.time))


async def settled():
    for _ in range(30):
        await asyncio.sleep(0)


def played(play):
    """Run play(place, desk)."""

    async def run():
        desk = Desk(max_open=5)
        place = Place(desk)
        with contextlib.closing(place.time):
            await play(place, desk)

    asyncio.run(run())


def answer_of(written):
    """The status of the one answer that was written, and its error's message."""
    head, body = written.split(b"\r\n\r\n")
    assert f"content-length: {len(body)}\r\n".encode() in head.lower() + b"\r\n"
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize("part", [b"", b"POST /v1/comple", post(BODY)[:-30], post(BODY)[:-1]])
def test_a_request_that_is_sent_in_part_ends_in_408(part):
    async def play(place, desk):
        wire = place.connect()
        if part:
            wire._protocol.data_received(part)
        await settled()
        place.time.passes(29)
        assert not wire.is_closing()
        place.time.passes(1)
        assert wire.is_closing()
        assert answer_of(wire.written) == (408, LATE)
        await settled()
        assert not place.state.connections
        assert not place.state.tasks
        assert desk.num_open == 0

    played(play)


def test_who_sends_little_by_little_gets_no_more_time():
    async def play(place, desk):
        wire = place.connect()
        for byte in post(BODY)[:-1]:
            wire._protocol.data_received(bytes([byte]))
            await settled()
            place.time.passes(1)
            if wire.is_closing():
                break
        assert answer_of(wire.written) == (408, LATE)
        assert place.time.now == 30

    played(play)


def test_an_answer_may_take_longer_than_the_request():
    async def play(place, desk):
        wire = place.connect()
        wire._protocol.data_received(post(BODY))
        await settled()
        place.time.passes(1000)
        write(desk, "abcde")
        await settled()
        assert b"200 OK" in wire.written
        assert b"abcde" in wire.written

    played(play)


def test_the_next_request_has_a_deadline_of_its_own():
    async def play(place, desk):
        wire = place.connect()
        for _ in range(3):
            place.time.passes(4)
            wire._protocol.data_received(HEALTH[:20])
            place.time.passes(25)
            wire._protocol.data_received(HEALTH[20:])
            await settled()
        assert wire.written.count(b"HTTP/1.1 503") == 3
        assert not wire.is_closing()
        wire._protocol.data_received(HEALTH[:20])
        place.time.passes(30)
        assert wire.written.count(b"HTTP/1.1 408") == 1

    played(play)


def test_a_pipelined_request_has_a_deadline_too():
    async def play(place, desk):
        wire = place.connect()
        wire._protocol.data_received(post(BODY) + post(BODY)[:-1])
        await settled()
        place.time.passes(1000)
        write(desk, "abcde")
        await settled()
        assert wire.written.count(b"HTTP/1.1 200") == 1
        place.time.passes(30)
        assert wire.written.count(b"HTTP/1.1 408") == 1

    played(play)


def test_a_body_after_its_refusal_is_dropped_until_its_deadline():
    async def play(place, desk):
        wire = place.connect()
        wire._protocol.data_received(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"
        )
        await settled()
        assert answer_of(wire.written)[0] == 413
        for _ in range(29):
            wire._protocol.data_received(b"x" * 100_000)
            await settled()
            place.time.passes(1)
        assert not wire._protocol.cycle.body
        assert not wire.is_closing()
        place.time.passes(1)
        assert wire.is_closing()
        assert answer_of(wire.written)[0] == 413

    played(play)


def test_who_leaves_leaves_no_timer():
    async def play(place, desk):
        wire = place.connect()
        wire._protocol.data_received(HEALTH[:20])
        wire.close()
        await settled()
        assert place.time._timers
        assert all(handle.cancelled() for _, handle, _ in place.time._timers)

    played(play)


def test_no_more_than_a_part_of_a_refused_body_is_read():
    async def play(place, desk):
        wire = place.connect()
        wire._protocol.data_received(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"
        )
        await settled()
        for _ in range(4):
            wire._protocol.data_received(b"x" * (Connection.max_dropped // 4))
            assert not wire.is_closing()
        wire._protocol.data_received(b"x")
        assert wire.is_closing()
        assert answer_of(wire.written)[0] == 413

    played(play)


@pytest.mark.parametrize("bad", [b"what?\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000])
def test_what_is_no_http_or_has_too_large_headers_gets_json(bad):
    async def play(place, desk):
        wire = place.connect()
        wire._protocol.data_received(bad)
        assert answer_of(wire.written) == (400, "Invalid HTTP request received.")
        assert wire.is_closing()

    played(play)


def test_nothing_is_written_after_the_answer_to_a_bad_request():
    async def play(place, desk):
        wire = place.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n200000\r\n"
        wire._protocol.data_received(head + b"x" * 0x200000 + b"\r\n")
        await settled()
        assert answer_of(wire.written)[0] == 413
        wire._protocol.data_received(b"no length\r\n")
        assert answer_of(wire.written)[0] == 413
        assert wire.is_closing()

    played(play)


def test_one_connection_more_than_the_limit_is_refused(monkeypatch):
    async def play(place, desk):
        monkeypatch.setattr(Connection, "max_connections", 2)
        wires = [place.connect() for _ in range(3)]
        assert [wire.is_closing() for wire in wires] == [False, False, True]
        assert answer_of(wires[2].written) == (503, "2 connections are open; try again later")
        assert b"retry-after: 1\r\n" in wires[2].written
        wires[0].close()
        await settled()
        fourth = place.connect()
        fourth._protocol.data_received(HEALTH)
        await settled()
        assert b"starting" in fourth.written

    played(play)


def test_real_sockets_are_limited_in_number_and_time(monkeypatch):
    monkeypatch.setattr(Connection, "request_s", 0.05)
    with serving_app(app_of(Desk(1)), max_open=-255) as (server, connect), connect() as client:
        assert client.recv(12) == b"HTTP/1.1 408"
        wait_until(lambda: not server.server_state.connections)
        monkeypatch.setattr(Connection, "request_s", 1000.0)
        with connect() as first:
            first.sendall(HEALTH)
            assert first.recv(12) == b"HTTP/1.1 503"  # it is starting, without ranks
            with connect() as second:
                assert b"1 connections are open" in second.recv(1000)
