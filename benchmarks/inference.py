"""Serving 32 requests with each idea, and without it; the notes count steps and tokens read, which no machine changes.

Ours is the engine with the idea, theirs the same engine, model and requests without it:

    continuous batching   requests enter and leave at every step    batches of 8 that run until their longest is done
    batching              up to 8 requests in a step                one after another
    prefix cache          on                                        off
    prompts in pieces     at most 32 tokens a step                  whole prompts; the note has the longest step of each
    speculation           4 guesses from repetitions in the text    none
    the same bits         batched                                   each token in a pass of its own (paged_model.py)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import Row, Times, race, row, run
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, NGramDraft, Options, Request
from minipar.model import Transformer

MODEL = ModelConfig(dim=128, num_layers=4, num_heads=4, max_seq_len=256)
BATCH = 8
PLAIN = Options(max_running=BATCH, prefix_cache=False)

# (name, options with the idea, options without it)
IDEAS: list[tuple[str, Options, Options]] = [
    ("batching", PLAIN, replace(PLAIN, max_running=1)),
    ("prefix cache", replace(PLAIN, prefix_cache=True), PLAIN),
    ("prompts in pieces", replace(PLAIN, token_budget=32), replace(PLAIN, token_budget=10_000)),
    ("speculation", replace(PLAIN, draft=NGramDraft(1), num_drafts=4), PLAIN),
    ("the same bits", PLAIN, replace(PLAIN, one_by_one=True)),
]


def requests(number: int) -> list[Request]:
    """Requests with one of two beginnings of 64 tokens, an end of their own, and 4 to 64 new tokens."""
    draw = random.Random(0)
    beginnings = [[draw.randrange(256) for _ in range(64)] for _ in range(2)]
    return [
        Request(
            tuple(draw.choice(beginnings) + [draw.randrange(256) for _ in range(draw.randrange(1, 32))]),
            max_new_tokens=draw.choice([4, 8, 16, 64]),
        )
        for _ in range(number)
    ]


def rows(quick: bool = False) -> list[Row]:
    rounds, several = (2, requests(8)) if quick else (3, requests(32))
    raced = [("continuous batching", *continuous_and_static(several))]
    raced += [(name, serve(several, one), serve(several, other)) for name, one, other in IDEAS]
    return [
        row(name, [times], note=note)
        for name, ours, theirs in raced
        for times, note in run(_race, ours, theirs, rounds, world_size=1)
    ]


def continuous_and_static(several: Sequence[Request]) -> tuple[Serve, Serve]:
    batches = [several[i : i + BATCH] for i in range(0, len(several), BATCH)]
    return serve(several, PLAIN), lambda model: [
        steps for batch in batches for steps in serve(batch, PLAIN)(model)
    ]


def serve(several: Sequence[Request], options: Options) -> Serve:
    """Return a function that serves the requests with a model, from an empty cache; it returns each step's tokens."""

    def run_engine(model: Transformer) -> list[int]:
        engine = Engine(model, options)
        engine.run(several)
        return [step.num_tokens for step in engine.steps]

    return run_engine


Serve = Callable[[Transformer], list[int]]


def _race(world: Comm, ours: Serve, theirs: Serve, rounds: int) -> tuple[Times, Any]:
    model = Transformer(MODEL)
    (a, b) = (ours(model), theirs(model))
    note = f"{len(a)} steps against {len(b)}, {sum(a)} tokens read against {sum(b)}, at most {max(a)} against {max(b)}"
    return race(world, lambda: ours(model), lambda: theirs(model), rounds), note
