"""What a dry run assumes, one entry for each function of the library that needs tensor values only a real run has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm


class Assumption(NamedTuple):
    """What a function of the library returns if it reads a tensor without values, or would return one.

    function  its dotted name, where its caller looks it up. A read must be the last thing that it does
    words     the assumption, as the report states it
    result    takes the function's arguments, and returns what is assumed in place of its result
    """

    function: str
    words: str
    result: Callable[..., Any]


def _in_turn(scores: Tensor, dim: int) -> Tensor:
    """Return ranks with which each row along `dim` prefers the number that follows the previous row's."""
    n, rest = scores.shape[dim], scores.movedim(dim, -1).shape[:-1]
    ranks = (torch.arange(n) - torch.arange(rest.numel())[:, None]) % n
    return ranks.view(*rest, n).movedim(-1, dim)


def _own(comm: Comm, digests: Tensor, lengths: list[int]) -> list[Counter[int]]:
    return [Counter(digests.tolist())] * comm.size


BALANCED = "the router sends every expert as many tokens, and drops none"
ASSUMED = (
    Assumption("minipar.comm.agreement._any_differs", "all ranks run the same model", lambda *_: False),
    Assumption("minipar.model.router.tie_ranks", BALANCED, _in_turn),
    Assumption(
        "minipar.model.router.random_second", "every token uses its second expert", lambda expert, *_: expert
    ),
    Assumption("minipar.train.step.routing", BALANCED, lambda *_: {}),
    Assumption(
        "minipar.train.step.loss_and_norm",
        "every loss and gradient norm is finite, and no gradient is clipped",
        lambda *_: (1.0, 0.5),
    ),
    Assumption(
        "minipar.train.optim.digests_of_ranks",
        "any share of a gradient's square may count towards the norm",
        _own,
    ),
    Assumption(
        "minipar.data_parallel.chunk_optimizer.ChunkOptimizer._refresh",
        "nothing but the optimizer writes to weights",
        lambda *_: None,
    ),
)
