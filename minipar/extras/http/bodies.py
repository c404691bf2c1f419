"""Convert HTTP request bodies to engine requests, and texts to response bodies, in the format of OpenAI's API.

A field that is left out or null has the default that it has in a requests file: temperature 0, seed 0, top_p 1. The default
of max_tokens is 16 for completions, as in OpenAI's API, and for chat the rest of the model's context, or of what the
cache holds. An unsupported field is refused by name, because ignoring it would give a different text from the one that the
client asked for.

The model continues text and was not trained on dialogue, so a plain template joins the messages into one text:

    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    system: Be brief.
    user: Hi
    assistant:                   and a space, after which the model continues
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from minipar.data.tokenizer import Codec
from minipar.inference.request import Request
from minipar.inference.text import Text as Text
from minipar.support.errors import one_of

ROLES = ("system", "developer", "user", "assistant")
SHARED = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "stream", "stream_options")
FIELDS = {
    "chat": ("messages", "max_completion_tokens", *SHARED),
    "completions": ("prompt", *SHARED),
}
MAX_STOPS = 4  # as in OpenAI's API


class BadRequest(Exception):
    """A body that cannot be served. `body` is the error in OpenAI's format; `param` names the field."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(_encodable(message))
        self.param = None if param is None else _encodable(param)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(str(self), "invalid_request_error", self.param, self.code)


def _encodable(text: str) -> str:
    """Escape what UTF-8 cannot encode: half of a surrogate pair, which JSON can spell in the name of a field."""
    return text.encode(errors="backslashreplace").decode()


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Asked(NamedTuple):
    """A parsed body.

    shape  "chat" or "completions"
    stop   strings; the answer ends before the first one that is complete
    """

    shape: str
    model: str
    request: Request
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


def read_body(shape: str, body: Any, model: str, longest_text: int, codec: Codec) -> Asked:
    """Parse a body of this shape. Raises BadRequest, which names the field.

    longest_text  number of tokens up to which a chat may continue if the body sets no limit
    """
    if not isinstance(body, dict):
        raise BadRequest("the body is no object of JSON")
    for name in body:
        if name not in FIELDS[shape]:
            raise BadRequest(f"{name!r} is not supported; use {one_of(FIELDS[shape])}", name)
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("model", model) != model:
        raise BadRequest(
            f"the model {given['model']!r} is not served; use {model!r}", "model", 404, "model_not_found"
        )
    if given.get("n", 1) != 1 or isinstance(given.get("n"), bool):
        raise BadRequest(f"n={given['n']!r}; use 1, and another seed for another text", "n")
    if not isinstance(stream := given.get("stream", False), bool):
        raise BadRequest(f"stream={stream!r}; use true or false", "stream")
    prompt = _prompt(shape, given, codec)
    longest = _field(given, "max_tokens", given.get("max_completion_tokens"))
    if longest is None:
        longest = 16 if shape == "completions" else max(1, longest_text - len(prompt))
    values: dict[str, Any] = {name: given[name] for name in ("temperature", "top_p", "seed") if name in given}
    request = _request(prompt, longest, values, "max_tokens" if "max_tokens" in given else None)
    return Asked(shape, model, request, _stop(given), stream, _include_usage(given))


def _field(given: Mapping[str, Any], name: str, other: Any) -> Any:
    if name in given and other is not None:
        raise BadRequest("max_tokens and max_completion_tokens are the same; use one of them", name)
    return given.get(name, other)


def _prompt(shape: str, given: Mapping[str, Any], codec: Codec) -> list[int]:
    name = "messages" if shape == "chat" else "prompt"
    if name not in given:
        raise BadRequest(f"{name} is missing", name)
    prompt = text_of(given[name]) if shape == "chat" else given[name]
    if isinstance(prompt, str):
        try:
            prompt = codec.encode(prompt)
        except ValueError as error:
            raise BadRequest(str(error), name) from None
    if not isinstance(prompt, list) or not all(type(token) is int and token >= 0 for token in prompt):
        raise BadRequest("prompt is neither a text nor a list of token ids; use one of these", name)
    if not prompt:
        raise BadRequest(f"{name} is empty; give at least one token to continue", name)
    return prompt


def text_of(messages: Any) -> str:
    """Join messages by the template above. Raises BadRequest, which names the message."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is no list with at least one message", "messages")
    lines = []
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{place} is no object with a role and a content", place)
        for name in message:
            if name not in ("role", "content"):
                raise BadRequest(f"{place}.{name} is not supported; use role and content", f"{place}.{name}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadRequest(f"{place}.role={role!r}; use {one_of(ROLES)}", f"{place}.role")
        if not isinstance(content, str):
            raise BadRequest(f"{place}.content is no text", f"{place}.content")
        lines.append(f"{role}: {content}\n")
    return "".join(lines) + "assistant: "


def _request(prompt: list[int], longest: Any, values: dict[str, Any], param: str | None) -> Request:
    """Return the engine's request. Each value is checked separately, so that an error names its field."""
    for name, value in values.items():
        try:
            Request((0,), 1, **{name: value})
        except ValueError as error:
            raise BadRequest(str(error), name) from None
    if type(longest) is not int or longest < 1:
        name = param or "max_completion_tokens"
        raise BadRequest(f"{name}={longest!r}; use a whole number of 1 or more", name)
    return Request(tuple(prompt), longest, **values)


def _stop(given: Mapping[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise BadRequest(
            f"stop={given['stop']!r}; use a text, or a list of at most {MAX_STOPS} texts", "stop"
        )
    return tuple(stop)


def _include_usage(given: Mapping[str, Any]) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise BadRequest(f"stream_options={options!r}; it may have include_usage alone", "stream_options")
    include = options.get("include_usage", False)
    if not isinstance(include, bool):
        raise BadRequest(f"stream_options.include_usage={include!r}; use true or false", "stream_options")
    return include


def usage(num_prompt: int, num_written: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
    }


def answer_body(asked: Asked, number: int, text: str, reason: str, num_written: int) -> dict[str, Any]:
    """Return the body of a complete response."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
    if asked.shape == "chat":
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = "chat.completion" if asked.shape == "chat" else "text_completion"
    return {
        **_head(asked, number, kind),
        "choices": [choice],
        "usage": usage(len(asked.request.prompt), num_written),
    }


def chunk_body(
    asked: Asked, number: int, text: str, reason: str | None = None, first: bool = False
) -> dict[str, Any]:
    """Return the body of one chunk of a streamed response; a chat's first chunk has the role."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
    if asked.shape == "chat":
        choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text else {})
    else:
        choice["text"] = text
    return {**_chunk_head(asked, number), "choices": [choice]}


def usage_chunk(asked: Asked, number: int, num_written: int) -> dict[str, Any]:
    return {
        **_chunk_head(asked, number),
        "choices": [],
        "usage": usage(len(asked.request.prompt), num_written),
    }


def _chunk_head(asked: Asked, number: int) -> dict[str, Any]:
    return _head(asked, number, "chat.completion.chunk" if asked.shape == "chat" else "text_completion")


def _head(asked: Asked, number: int, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if asked.shape == "chat" else "cmpl"
    return {"id": f"{prefix}-{number}", "object": kind, "created": int(time.time()), "model": asked.model}
