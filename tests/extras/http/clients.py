"""Clients of the application without ranks: the tests stand at the Desk in their place."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

import httpx

from minipar.extras.http.app import Served, make_app
from minipar.extras.http.live import Progress
from minipar.extras.http.server import bound_socket, make_server
from minipar.inference.events import Event, Kind
from minipar.train.data.tokenizer import Bytes


def app_of(desk, codec=None, longest_text=64):
    return make_app(Served("x", longest_text, codec or Bytes(), desk))


@contextmanager
def client_of(app):
    """A function that sends a request to the application, on its event loop: method, path, and httpx's arguments."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    async def send(method, path, **how):
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, **how)

    with asyncio.Runner() as runner:
        yield lambda method, path, **how: runner.run(send(method, path, **how))


def told(answer):
    """The error of an answer, which is in OpenAI's shape."""
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert list(error) == ["message", "type", "param", "code"]
    return error


def write(desk, text, is_last=True, number=None):
    """Tell the clients of all open requests, or of one, the next tokens, as the ranks do."""
    for open_number in list(desk._open) if number is None else [number]:
        kinds = (Kind.WRITE, Kind.FINISH) if is_last else (Kind.WRITE,)
        events = tuple(Event(kind, open_number, 0.0, 0.0, len(text)) for kind in kinds)
        desk.answer(0, Progress(events, {open_number: list(text.encode())}, num_running=1))


@contextmanager
def serving_app(app, max_open=100):
    """uvicorn with this application, in a thread: the server, and a function that returns a new connection to it."""
    server, bound = make_server(app, max_open), bound_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield server, lambda: socket.create_connection(bound.getsockname()[:2], timeout=300)
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


def post(body, head=""):
    """The bytes of a request for a completion."""
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def wait_until(true):
    deadline = time.monotonic() + 300
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing came of it in five minutes")
        time.sleep(0.01)
