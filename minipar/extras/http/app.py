"""The routes: chat completions, completions, the model, health and metrics. Every error is JSON in OpenAI's format.

The event loop serves all clients, so nothing here takes long: a body is refused once it is larger than a text that the
model can take, a large one is parsed in a thread, and tokens that came since the last event become one event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from minipar.extras.http.bodies import (
    Asked,
    BadRequest,
    Text,
    answer_body,
    chunk_body,
    error_body,
    not_served,
    read_body,
    usage_chunk,
)  # fmt: skip
from minipar.extras.http.live import Closed, Desk, Heard, QueueFull
from minipar.extras.http.prometheus import CONTENT_TYPE, metrics_text
from minipar.support.errors import one_of
from minipar.train.data.tokenizer import Codec

LARGE_BODY = 1 << 14  # bytes; to parse more takes long enough to leave it to a thread


@dataclass(frozen=True)
class Served:
    """The service behind the routes: a named model, and the Desk at which its ranks fetch requests.

    longest_text  maximum number of tokens of a text, including the prompt
    """

    name: str
    longest_text: int
    codec: Codec
    desk: Desk

    @property
    def max_body(self) -> int:
        """Maximum number of bytes of a body: some ten times those of a text of so many tokens, since JSON may escape it."""
        return max(1 << 20, 64 * self.longest_text)


def make_app(served: Served) -> Starlette:
    """Return the ASGI application."""
    desk = served.desk

    def completions(shape: str) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(http: HttpRequest) -> Response:
            return await _answer(http, await _asked(http, shape, served), served)

        return answer

    model = {"id": served.name, "object": "model", "created": 0, "owned_by": "minipar"}

    async def models(http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(http: HttpRequest) -> Response:
        if (name := http.path_params["name"]) != served.name:
            raise not_served(name, served.name)
        return JSONResponse(model)

    async def health(http: HttpRequest) -> Response:
        status = "stopping" if desk.is_closed else "ok" if desk.is_ready else "starting"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics(http: HttpRequest) -> Response:
        return PlainTextResponse(metrics_text(desk), media_type=CONTENT_TYPE)

    routes = [
        Route("/v1/chat/completions", completions("chat"), methods=["POST"]),
        Route("/v1/completions", completions("completions"), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name}", one_model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]

    async def refuse(http: HttpRequest, error: Exception) -> Response:
        status, body, headers = 500, error_body("the server has failed; its log says why", "server_error"), {}
        if isinstance(error, ClientDisconnect):  # before the end of its body, so nobody reads this answer
            status = 499
        elif isinstance(error, BadRequest):
            status, body = error.status, error.body
        elif isinstance(error, QueueFull):
            why = f"{desk.max_open} requests are open, and no more are taken; try again later"
            status, body = 429, error_body(why, "rate_limit_error", code="queue_full")
        elif isinstance(error, Closed | Stopped):
            status, body = 503, error_body(str(error) or "the server is stopping", "server_error")
        elif isinstance(error, HTTPException):
            path, status, headers = http.url.path, error.status_code, dict(error.headers or {})
            why = (
                f"{http.method} is not for {path}; use {headers['Allow']}"
                if "Allow" in headers
                else f"{path} is not served; use {one_of(route.path for route in routes)}"
            )
            body = BadRequest(why).body
        if status in (429, 503):
            headers["Retry-After"] = "1"
        return JSONResponse(body, status, headers)

    return Starlette(
        routes=routes,
        exception_handlers={
            error: refuse
            for error in (BadRequest, QueueFull, Closed, Stopped, HTTPException, ClientDisconnect, Exception)
        },
    )


class Stopped(Exception):
    """The ranks or the server ended before the text was finished."""


class Answer:
    """A request that a coroutine has submitted to the Desk. `next` returns its messages; closing it early cancels it."""

    def __init__(self, desk: Desk, asked: Asked):
        loop, self._heard = asyncio.get_running_loop(), asyncio.Queue[Heard]()

        def listen(heard: Heard) -> None:
            with suppress(RuntimeError):  # raised if the event loop has ended
                loop.call_soon_threadsafe(self._heard.put_nowait, heard)

        self._desk = desk
        self.number = desk.submit(asked.request, listen)

    async def next(self) -> Heard:
        """Return what the Desk has told since the last call, or wait for it.

        Raises BadRequest if the engine refuses the request, Stopped if the ranks end.
        """
        heard = await self._heard.get()
        while not self._heard.empty():
            later = self._heard.get_nowait()
            heard = later._replace(tokens=heard.tokens + later.tokens)
        if heard.error is not None:
            raise BadRequest(heard.error) if heard.was_refused else Stopped(heard.error)
        return heard

    def close(self, is_complete: bool = False) -> None:
        self._desk.cancel(self.number, is_complete)


class Stream(StreamingResponse):
    """A streamed response. When it ends, for whatever reason, its request is closed, even if nothing was streamed yet."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, pieces: AsyncIterator[str]):
        super().__init__(pieces)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def _answer(http: HttpRequest, asked: Asked, served: Served) -> Response:
    answer = Answer(served.desk, asked)
    gone = asyncio.ensure_future(_gone(http))
    work = asyncio.ensure_future(answer.next() if asked.stream else _whole(answer, asked, served.codec))
    try:
        await asyncio.wait([gone, work], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            answer.close()
            return Response(status_code=499)  # the client has gone, so nobody reads this
        result = work.result()
    except BaseException:
        answer.close()
        raise
    finally:
        gone.cancel()
        work.cancel()
    if isinstance(result, Heard):
        return Stream(answer, _pieces(answer, result, asked, served.codec))
    return JSONResponse(result)


async def _gone(http: HttpRequest) -> None:
    """Return once the client has disconnected."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _whole(answer: Answer, asked: Asked, codec: Codec) -> dict[str, Any]:
    text, written, is_last = Text(codec, asked.stop, asked.request.prompt), "", False
    while not is_last and not text.has_stopped:
        heard = await answer.next()
        written, is_last = written + text.add(heard.tokens, heard.is_last), heard.is_last
    answer.close(is_complete=True)
    return answer_body(asked, answer.number, written, _reason(text), len(text.tokens))


async def _pieces(answer: Answer, heard: Heard, asked: Asked, codec: Codec) -> AsyncIterator[str]:
    """Yield the server-sent events of a response. `heard` is the Desk's first message about the request."""
    text, events = Text(codec, asked.stop, asked.request.prompt), 0
    try:
        while True:
            new = text.add(heard.tokens, heard.is_last)
            ends = heard.is_last or text.has_stopped
            chunks = [chunk_body(asked, answer.number, new, first=not events)] if new or not events else []
            if ends:
                answer.close(is_complete=True)
                chunks.append(chunk_body(asked, answer.number, "", _reason(text)))
                if asked.include_usage:
                    chunks.append(usage_chunk(asked, answer.number, len(text.tokens)))
            # In one piece: to a client that has gone, only a few can be sent before the event loop knows.
            if chunks:
                yield "".join(map(_event, chunks)) + ("data: [DONE]\n\n" if ends else "")
            if ends:
                return
            events += len(chunks)
            heard = await answer.next()
    except Stopped as error:
        yield _event(error_body(str(error), "server_error"))


def _reason(text: Text) -> str:
    """Return why a text ended: at a stop string, or at max_tokens, since requests cannot set end tokens."""
    return "stop" if text.has_stopped else "length"


def _event(body: dict[str, Any]) -> str:
    # All but ASCII is escaped, since some clients take U+2028 or U+0085 for the end of an event's line.
    return f"data: {json.dumps(body)}\n\n"


async def _asked(http: HttpRequest, shape: str, served: Served) -> Asked:
    too_large = BadRequest(
        f"the body has more than {served.max_body} bytes; a text may have {served.longest_text} tokens",
        status=413,
        code="request_too_large",
    )
    if int(http.headers.get("content-length", 0)) > served.max_body:
        raise too_large
    content = bytearray()
    async for piece in http.stream():
        content += piece
        if len(content) > served.max_body:
            raise too_large
    if len(content) < LARGE_BODY:  # at once, so that it waits for no large one
        return _read(shape, content, served)
    return await asyncio.to_thread(_read, shape, content, served)


def _read(shape: str, content: bytearray, served: Served) -> Asked:
    try:
        body = json.loads(content)
    except RecursionError:
        raise BadRequest("the body's values are nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    return read_body(shape, body, served.name, served.longest_text, served.codec)
