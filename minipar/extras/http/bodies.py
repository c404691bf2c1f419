"""Convert HTTP request bodies to engine requests, and texts to response bodies, in the format of OpenAI's API.

A field that is left out or null has the default that it has in a requests file: temperature 0, seed 0, top_p 1. The default
of max_tokens is 16 for completions, as in OpenAI's API, and for chat the rest of the model's context, or of what the
cache holds. A field of OpenAI's that is not served is accepted where its value asks for nothing, and otherwise refused by
name, because ignoring it would give a different text from the one that the client asked for.

The model continues text and was not trained on dialogue, so a plain template joins the messages into one text:

    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    system: Be brief.
    user: Hi
    assistant:                   and a space, after which the model continues
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from minipar.inference.request import Request
from minipar.inference.text import Text as Text
from minipar.support.errors import one_of
from minipar.train.data.tokenizer import Codec

ROLES = ("system", "developer", "user", "assistant")
SHARED = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options")
FIELDS = {
    "chat": ("messages", "max_completion_tokens", *SHARED),
    "completions": ("prompt", *SHARED),
}
# What is not served, and the values of it that ask for nothing: these, or all values of a type.
Neutral = Mapping[str, tuple[object, ...]]
NEUTRAL: Neutral = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),  # not OpenAI's: programs that measure servers send it
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": (dict,),
    "user": (str,),
    "safety_identifier": (str,),
    "prompt_cache_key": (str,),
    "prompt_cache_retention": ("in_memory",),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
}
NEUTRAL_IN_MESSAGE: Neutral = {"type": ("text",), "tool_calls": ([],), "annotations": ([],)}
NEUTRAL_IN_STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,)}
MAX_STOPS = 4  # as in OpenAI's API
MAX_STOP_CHARS = 1000  # the end of a text is compared with every beginning of a stop


class BadRequest(Exception):
    """A body that cannot be served. `body` is the error in OpenAI's format; `param` names the field."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(_printable(message))
        self.param = None if param is None else _printable(param)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(str(self), "invalid_request_error", self.param, self.code)


def _printable(text: str) -> str:
    """Shorten what quotes a large body, and escape what UTF-8 cannot encode: half of a surrogate pair."""
    if len(text) > 1000:
        text = f"{text[:600]} ... {text[-300:]}"
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

    longest_text  maximum number of tokens of a text, including the prompt
    """
    if not isinstance(body, dict):
        raise BadRequest("the body is no object of JSON")
    given = _given(body, FIELDS[shape], NEUTRAL)
    if given.get("model", model) != model:
        raise not_served(given["model"], model)
    stop, stream, include_usage = _stop(given), _flag(given, "stream"), _include_usage(given)
    values = {name: given[name] for name in ("temperature", "top_p", "seed") if name in given}
    for name, value in values.items():  # each separately, so that an error names its field
        try:
            Request((0,), 1, **{name: value})
        except ValueError as error:
            raise BadRequest(str(error), name) from None
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(limits) > 1:
        raise BadRequest("max_tokens and max_completion_tokens are the same; use one of them", limits[0])
    for limit in limits:
        if type(given[limit]) is not int or given[limit] < 1:
            raise BadRequest(f"{limit}={given[limit]!r}; use a whole number of 1 or more", limit)
    source = "messages" if shape == "chat" else "prompt"
    prompt = _prompt(shape, given, codec)
    rest = 16 if shape == "completions" else max(1, longest_text - len(prompt))
    longest = given[limits[0]] if limits else rest
    if len(prompt) + longest > longest_text:
        raise BadRequest(
            f"{len(prompt)} tokens of {source} and {longest} new ones exceed the maximum context length of {longest_text}; "
            "shorten one of them",
            source,
            code="context_length_exceeded",
        )
    return Asked(shape, model, Request(tuple(prompt), longest, **values), stop, stream, include_usage)


def not_served(name: object, model: str) -> BadRequest:
    return BadRequest(f"the model {name!r} is not served; use {model!r}", "model", 404, "model_not_found")


def _given(
    values: Mapping[str, Any], served: tuple[str, ...], neutral: Neutral, place: str = ""
) -> dict[str, Any]:
    """Return the served fields that are not null. Raises BadRequest for another, unless its value asks for nothing."""
    given = {name: value for name, value in values.items() if value is not None}
    for name in [name for name in given if name not in served]:
        field = place + name
        if name not in neutral:
            near = one_of(served, near=name[:40])
            raise BadRequest(f"{field!r} is not supported; use {near}", field)
        if not any(_is(given[name], value) for value in neutral[name]):
            words: dict[type, str] = {str: "a text", dict: "an object"}
            uses = ["null", *(words[v] if isinstance(v, type) else json.dumps(v) for v in neutral[name])]
            raise BadRequest(f"{field}={given[name]!r} is not supported; use {one_of(uses)}", field)
    return {name: given[name] for name in served if name in given}


def _is(value: object, neutral: object) -> bool:
    if isinstance(neutral, type):
        return isinstance(value, neutral)
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _flag(given: Mapping[str, Any], name: str, place: str = "") -> bool:
    if not isinstance(flag := given.get(name, False), bool):
        raise BadRequest(f"{place}{name}={flag!r}; use true or false", f"{place}{name}")
    return flag


def _prompt(shape: str, given: Mapping[str, Any], codec: Codec) -> list[int]:
    name = "messages" if shape == "chat" else "prompt"
    if name not in given:
        raise BadRequest(f"{name} is missing", name)
    prompt = text_of(given[name]) if shape == "chat" else given[name]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        try:
            prompt = codec.encode(prompt)
        except ValueError as error:
            raise BadRequest(str(error), name) from None
    if not isinstance(prompt, list) or not all(type(token) is int and token >= 0 for token in prompt):
        raise BadRequest("prompt is neither a text nor a list of token ids, nor a list of one of them", name)
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
        given = _given(message, ("role", "content"), NEUTRAL_IN_MESSAGE, f"{place}.")
        role = given.get("role")
        if role not in ROLES:
            raise BadRequest(f"{place}.role={role!r}; use {one_of(ROLES)}", f"{place}.role")
        lines.append(f"{role}: {_content(given.get('content'), f'{place}.content')}\n")
    return "".join(lines) + "assistant: "


def _content(content: Any, place: str) -> str:
    """Return a message's content: a text, or parts of type "text", which are joined."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise BadRequest(f"{place} is no text, and no list of text parts", place)
    texts = []
    for i, part in enumerate(parts):
        part = _given(part, ("text",), {"type": ("text",)}, f"{place}[{i}].")
        if not isinstance(text := part.get("text"), str):
            raise BadRequest(f"{place}[{i}].text is no text", f"{place}[{i}].text")
        texts.append(text)
    return "".join(texts)


def _stop(given: Mapping[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stop, list)
        or len(stop) > MAX_STOPS
        or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stop)
    ):
        raise BadRequest(
            f"stop={given['stop']!r}; use a text, or a list of at most {MAX_STOPS} texts, "
            f"each of 1 to {MAX_STOP_CHARS} characters",
            "stop",
        )
    return tuple(stop)


def _include_usage(given: Mapping[str, Any]) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise BadRequest(f"stream_options={options!r}; use an object with include_usage", "stream_options")
    place = "stream_options."
    return _flag(
        _given(options, ("include_usage",), NEUTRAL_IN_STREAM_OPTIONS, place), "include_usage", place
    )


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
