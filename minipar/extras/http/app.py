"""The routes: chat completions, completions, the model, health and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from minipar.data.tokenizer import Codec
from minipar.extras.http.bodies import (
    Asked,
    BadRequest,
    Text,
    answer_body,
    chunk_body,
    error_body,
    read_body,
    usage_chunk,
)  # fmt: skip
from minipar.extras.http.live import Closed, Desk, Heard, QueueFull
from minipar.extras.http.prometheus import CONTENT_TYPE, metrics_text


@dataclass(frozen=True)
class Served:
    """The service behind the routes: a named model, and the Desk at which its ranks fetch requests.

    longest_text  maximum number of tokens of a text, including the prompt
    """

    name: str
    longest_text: int
    codec: Codec
    desk: Desk


def make_app(served: Served) -> Starlette:
    """Return the ASGI application."""
    desk = served.desk

    def completions(shape: str) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(http: HttpRequest) -> Response:
            try:
                asked = await _asked(http, shape, served)
                return await _answer(http, asked, served)
            except ClientDisconnect:  # before the end of its body, so nobody reads this answer
                return Response(status_code=499)
            except BadRequest as error:
                return JSONResponse(error.body, error.status)
            except QueueFull:
                why = f"{desk.max_open} requests are open, and no more are taken; try again later"
                return JSONResponse(error_body(why, "rate_limit_error", code="queue_full"), 429)
            except (Closed, Stopped) as error:
                return JSONResponse(error_body(str(error) or "the server is stopping", "server_error"), 503)

        return answer

    async def models(http: HttpRequest) -> Response:
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "minipar"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(http: HttpRequest) -> Response:
        status = "stopping" if desk.is_closed else "ok" if desk.is_ready else "starting"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics(http: HttpRequest) -> Response:
        return PlainTextResponse(metrics_text(desk), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", completions("chat"), methods=["POST"]),
            Route("/v1/completions", completions("completions"), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
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
        """Return the Desk's next message. Raises BadRequest if the engine refuses the request, Stopped if the ranks end."""
        heard = await self._heard.get()
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
    text, first = Text(codec, asked.stop, asked.request.prompt), True
    try:
        while True:
            new = text.add(heard.tokens, heard.is_last)
            if new or first:
                yield _event(chunk_body(asked, answer.number, new, first=first))
                first = False
            if heard.is_last or text.has_stopped:
                break
            heard = await answer.next()
        answer.close(is_complete=True)
        yield _event(chunk_body(asked, answer.number, "", _reason(text)))
        if asked.include_usage:
            yield _event(usage_chunk(asked, answer.number, len(text.tokens)))
        yield "data: [DONE]\n\n"
    except Stopped as error:
        yield _event(error_body(str(error), "server_error"))


def _reason(text: Text) -> str:
    """Return why a text ended: at a stop string, or at max_tokens, since requests cannot set end tokens."""
    return "stop" if text.has_stopped else "length"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _asked(http: HttpRequest, shape: str, served: Served) -> Asked:
    content = await http.body()
    try:
        return read_body(shape, _json(content), served.name, served.longest_text, served.codec)
    except RecursionError:
        raise BadRequest("the body's values are nested too deeply") from None


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
