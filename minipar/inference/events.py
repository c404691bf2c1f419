"""The log of an engine: each event of a request, with its time. All metrics and plots are made from it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    ARRIVE = "arrive"
    REFUSE = "refuse"
    HIT = "hit"  # the first num_tokens of the text were in the prefix cache
    PREFILL = "prefill"  # num_tokens of a prompt, or of a text that is recomputed after a preemption
    DECODE = "decode"  # the last generated token and its drafts: num_tokens together
    GUESSED = "guessed"  # num_tokens guesses of a draft were verified in this step
    ACCEPTED = "accepted"  # num_tokens guesses of a draft were right
    PAD = "padding"  # num_tokens of padding, computed for a finished request until its static batch ended: see static.py
    WRITE = "write"  # num_tokens were generated
    PREEMPT = "preempt"  # the request lost its blocks
    RESTORE = "restore"  # num_tokens were loaded back from CPU memory
    FINISH = "finish"  # all num_tokens of its answer are generated
    FAIL = "fail"  # after num_tokens were generated, no further one could be chosen
    CANCEL = "cancel"  # the client cancelled it after num_tokens were generated


class Event(NamedTuple):
    """Something that happened to one request during a step, from begin_s to end_s, or at one moment."""

    kind: Kind
    number: int  # the request's index in the list of requests
    begin_s: float
    end_s: float
    num_tokens: int = 0


class StepCounts(NamedTuple):
    """Totals of a step: its time, its tokens, blocks held by requests, and blocks held by the prefix cache alone."""

    begin_s: float
    end_s: float
    num_tokens: int
    blocks_of_requests: int
    blocks_of_prefixes: int
    num_waiting: int  # requests that have arrived but hold no block
