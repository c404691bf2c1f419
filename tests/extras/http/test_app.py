"""The routes, without ranks: refusals in OpenAI's shape, bodies that are too large, and what a stream sends when."""

import asyncio
import json
import logging
import threading

import httpx
import pytest

from minipar.extras.http import app as app_module
from minipar.extras.http.app import Served
from minipar.extras.http.live import Desk
from minipar.inference import Request
from minipar.train.data.tokenizer import Bytes
from tests.extras.http.clients import app_of, client_of, post, serving_app, told, wait_until, write

TEXT = json.dumps(dict(prompt="x", max_tokens=60, stream=True, stream_options={"include_usage": True}))


def test_each_refusal_is_json_in_the_shape_of_openai():
    desk = Desk(max_open=0)
    with client_of(app_of(desk)) as send:
        missing, wrong = send("GET", "/v1/embeddings"), send("GET", "/v1/completions")
        unknown, full = send("GET", "/v1/models/gpt"), send("POST", "/v1/completions", json=dict(prompt="x"))
        long = send("POST", "/v1/completions", json=dict(prompt="x" * 64))
        health = send("GET", "/health")
        desk.close()
        closed = send("POST", "/v1/completions", json=dict(prompt="x"))
        desk.submit = None
        failed = send("POST", "/v1/completions", json=dict(prompt="x"))
    answers = [missing, wrong, unknown, full, long, closed, failed]
    assert [answer.status_code for answer in answers] == [404, 405, 404, 429, 400, 503, 500]
    assert [told(answer)["code"] for answer in answers] == [
        None, None, "model_not_found", "queue_full", "context_length_exceeded", None, None,
    ]  # fmt: skip
    assert told(missing)["message"].startswith(
        "/v1/embeddings is not served; use /v1/chat/completions, /v1/comp"
    )
    assert (told(wrong)["message"], wrong.headers["allow"]) == (
        "GET is not for /v1/completions; use POST",
        "POST",
    )
    retry = [answer.headers.get("retry-after") for answer in [*answers, health]]
    assert retry == [None, None, None, "1", None, "1", None, None]


def test_a_model_is_found_by_its_name():
    with client_of(app_of(Desk(1))) as send:
        one, all_models = send("GET", "/v1/models/x").json(), send("GET", "/v1/models").json()["data"]
    assert [one] == all_models
    assert one["id"] == "x"


def whole_of(size):
    """A body of so many bytes that asks for nothing that is served."""
    return b'{"prompt": "' + b"x" * (size - 14) + b'"}'


def test_a_body_may_have_the_largest_size_and_no_byte_more():
    limit = Served("x", 64, Bytes(), Desk(1)).max_body
    with client_of(app_of(Desk(1))) as send:

        def statuses(size):
            async def pieces():
                yield whole_of(size)

            ways = (whole_of(size), pieces())  # with Content-Length, and without
            return [told(send("POST", "/v1/completions", content=way))["code"] for way in ways]

        assert statuses(limit) == ["context_length_exceeded"] * 2
        assert statuses(limit + 1) == ["request_too_large"] * 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_of_100_mb_stops_no_stream_and_is_not_read(path, is_declared):
    desk, piece, size = Desk(max_open=20), b"x" * 65536, 100_000_000
    app, heard, read = app_of(desk), [asyncio.Queue() for _ in range(20)], 0

    def scope(path, headers=()):
        return dict(type="http", method="POST", path=path, query_string=b"", headers=list(headers))

    async def stream(i):
        body = iter([dict(type="http.request", body=TEXT.encode())])

        async def receive():
            return next(body, None) or await asyncio.Future()

        await app(scope("/v1/completions"), receive, heard[i].put)

    async def all_streams_go_on(is_last=False):
        write(desk, "a", is_last)
        for queue in heard:
            while b"a" not in json.dumps(text_of_events((await queue.get()).get("body", b""))).encode():
                pass

    async def run():
        streams = [asyncio.create_task(stream(i)) for i in range(20)]
        while desk.num_open < 20:
            await asyncio.sleep(0)
        answer = []

        async def receive():
            nonlocal read
            await all_streams_go_on()
            read += len(piece)
            return dict(type="http.request", body=piece, more_body=read < size)

        async def send(message):
            answer.append(message)

        length = [(b"content-length", str(size).encode())] if is_declared else []
        await app(scope(path, length), receive, send)
        await all_streams_go_on(is_last=True)
        await asyncio.gather(*streams)
        return answer[0]["status"]

    assert asyncio.run(run()) == 413
    assert read == 0 if is_declared else read <= Served("x", 64, Bytes(), desk).max_body + len(piece)


def text_of_events(body):
    bodies = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    return "".join(
        choice["text"] for one in bodies if one != b"[DONE]" for choice in json.loads(one)["choices"]
    )


class Waits(Bytes):
    """A codec that takes as long for a large text as another client needs to be answered."""

    def __init__(self):
        self.begins, self.other_is_answered = threading.Event(), threading.Event()

    def encode(self, text):
        if len(text) > 1000:
            self.begins.set()
            assert self.other_is_answered.wait(60)
        return super().encode(text)


def test_others_are_answered_while_large_bodies_are_parsed():
    codec = Waits()
    app = app_of(Desk(max_open=0), codec)
    large = whole_of(app_module.LARGE_BODY)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
            first = [asyncio.create_task(client.post("/v1/completions", content=large)) for _ in range(40)]
            while not codec.begins.is_set():
                await asyncio.sleep(0)
            small = await client.post("/v1/completions", json=dict(prompt="x"))
            codec.other_is_answered.set()
            return small.status_code, {told(await one)["code"] for one in first}

    assert asyncio.run(run()) == (429, {"context_length_exceeded"})


def messages_of_a_stream(desk, told_before):
    """What the application sends of a stream whose client hears nothing until `told_before` is over."""
    sent, asks = [], iter([dict(type="http.request", body=TEXT.encode())])

    async def receive():
        return next(asks, None) or await asyncio.Future()

    async def send(message):
        if not sent:
            told_before()
            await asyncio.sleep(0)  # the event loop passes on what it was told
        sent.append(message)

    async def run():
        scope = dict(type="http", method="POST", path="/v1/completions", query_string=b"", headers=[])
        task = asyncio.create_task(app_of(desk)(scope, receive, send))
        while not desk.num_open:
            await asyncio.sleep(0)
        write(desk, "a", is_last=False)
        await task

    asyncio.run(run())
    return sent


def test_tokens_that_wait_become_one_event():
    desk = Desk(max_open=1)

    def tell():
        for i in range(58):
            write(desk, "bc"[i % 2], is_last=i == 57)

    _, first, rest, end = messages_of_a_stream(desk, tell)
    assert text_of_events(first["body"]) == "a"
    assert text_of_events(rest["body"]) == "bc" * 29
    *chunks, last, used, done = rest["body"].strip().split(b"\n\n")
    assert len(chunks) == 1
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
    assert json.loads(used[6:])["usage"] == {"prompt_tokens": 1, "completion_tokens": 59, "total_tokens": 60}
    assert (done, end["body"]) == (b"data: [DONE]", b"")


def test_an_event_has_no_character_that_ends_a_line():
    desk, text = Desk(max_open=1), "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\r\n"
    sent = messages_of_a_stream(desk, lambda: write(desk, text))
    events = b"".join(message.get("body", b"") for message in sent).decode()
    assert text_of_events(events.encode()) == "a" + text
    assert events.splitlines() == events.removesuffix("\n").split("\n")


def test_what_is_told_to_a_client_that_has_gone_is_not_sent(caplog):
    desk = Desk(max_open=1)
    with caplog.at_level(logging.WARNING), serving_app(app_of(desk)) as (server, connect):
        with connect() as client:
            client.sendall(post(TEXT))
            wait_until(lambda: desk.num_open)
            write(desk, "a", is_last=False)
            assert client.recv(12) == b"HTTP/1.1 200"
            loop = server.servers[0].get_loop()
            held, goes_on = threading.Event(), threading.Event()
            loop.call_soon_threadsafe(lambda: (held.set(), goes_on.wait()))
            held.wait()
            for _ in range(20):
                write(desk, "a", is_last=False)
            write(desk, "a")
        goes_on.set()
        with connect() as client:  # answered after all that was told before
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
    assert [record.message for record in caplog.records] == []


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_makes_room_for_the_next(stream):
    desk = Desk(max_open=1)
    body = json.dumps(dict(prompt="x", stream=stream))
    with serving_app(app_of(desk)) as (_, connect):
        with connect() as client, connect() as other:
            client.sendall(post(body))
            wait_until(lambda: desk.num_open)
            if stream:
                write(desk, "a", is_last=False)
                assert client.recv(12) == b"HTTP/1.1 200"
            other.sendall(post(body))
            assert other.recv(12) == b"HTTP/1.1 429"
        wait_until(lambda: not desk.num_open)
        with connect() as client:
            client.sendall(post(body))
            wait_until(lambda: desk.num_open)
            write(desk, "a")
            assert client.recv(12) == b"HTTP/1.1 200"
        assert desk.submit(Request((1,), 1), lambda heard: None) == 2
