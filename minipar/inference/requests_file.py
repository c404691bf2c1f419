"""Reads requests from a file of one JSON object per line; writes each result to another file as soon as it is known."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minipar.inference.request import Request
from minipar.support.errors import one_of

FIELDS = {field.name: field for field in dataclasses.fields(Request)}
REQUIRED = [name for name, field in FIELDS.items() if field.default is dataclasses.MISSING]


def read_requests(path: Path, encode: Callable[[str], list[int]]) -> list[Request | str]:
    """Return the request of each line that is not blank, or a one-line message where a line is not a request.

    Lines end at newlines alone: JSON's texts may have other line separators in them, such as U+2028.

    A line has the fields of `Request`; its prompt is a text, or a list of token ids:

        {"prompt": "The ", "max_new_tokens": 20, "temperature": 0.7, "seed": 3, "arrival_s": 0.5}
    """
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [_request(number, line, encode) for number, line in enumerate(lines, 1) if line.strip()]


def _request(number: int, line: bytes, encode: Callable[[str], list[int]]) -> Request | str:
    try:
        values = json.loads(line.decode())
        if not isinstance(values, dict):
            raise ValueError(
                'a request is an object of JSON, such as {"prompt": "The ", "max_new_tokens": 20}'
            )
        if unknown := [name for name in values if name not in FIELDS]:
            raise ValueError(
                f"{unknown[0]!r} is no field of a request; use {one_of(list(FIELDS), near=unknown[0])}"
            )
        if lacking := [name for name in REQUIRED if name not in values]:
            raise ValueError(f"{lacking[0]} is missing")
        if isinstance(values["prompt"], str):
            values["prompt"] = encode(values["prompt"])
        return Request(**values)
    except json.JSONDecodeError as error:
        return f"line {number}: not JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"line {number}: not UTF-8: {error.reason} at byte {error.start}"
    except RecursionError:
        return f"line {number}: its values are nested too deeply"
    except ValueError as error:
        return f"line {number}: {error}"


class ResultsFile:
    """A file to which each result is appended as soon as it is known, so that results are kept however the service ends.

    Raises ValueError if the file cannot be written; the file then has all earlier lines, and no incomplete line.
    """

    def __init__(self, path: Path):
        self.path, self._end = path, 0
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None

    def append(self, line: str) -> None:
        data = line.encode()
        try:
            written = self._file.write(data)
            if written < len(data):  # the disk is full: the next write raises
                self._file.write(data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise ValueError(f"{self.path} cannot be written: {error.strerror}") from None
        self._end += len(data)

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def result_line(number: int, tokens: list[int], text: str, error: str | None) -> str:
    """Return the line of a result; `number` is the index of its request among the lines that are not blank."""
    values: dict[str, Any] = {"request": number}
    values |= {"tokens": tokens, "text": text} if error is None else {"error": error}
    return json.dumps(values, ensure_ascii=False) + "\n"
