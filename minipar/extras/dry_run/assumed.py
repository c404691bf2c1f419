"""The values that a dry run assumes, one for each line of the library that reads a tensor value only a real run has."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Assumption(NamedTuple):
    """The value that is assumed where a function of the library reads a tensor without values.

    module, function   which function reads it
    words              the assumption, as the report states it
    value              returns the assumed value; is called with the tensor and the frame of `function`
    """

    module: str
    function: str
    words: str
    value: Callable[[Tensor, FrameType], Any]


def _even(x: Tensor, total: int) -> list[int]:
    """Divide `total` rows evenly over the elements of x."""
    share, rest = divmod(total, x.numel())
    return [share + (i < rest) for i in range(x.numel())]


def _rows_of_every_rank(x: Tensor, frame: FrameType) -> Any:
    """Return the counts that `row_counts` all-gathers, as if every rank divided its rows evenly over the experts."""
    assert frame.f_back is not None
    own, p = frame.f_locals["counts"], frame.f_locals["p"]
    rows = _even(own, frame.f_back.f_locals["rows"].shape[0])
    return torch.tensor(rows * p).view(x.shape).tolist()


FINITE = "every loss and gradient norm is finite, and no gradient is clipped"
BALANCED = "the router sends every expert as many tokens, and drops none"
ASSUMED = (
    Assumption("minipar.train.step", "train_step", FINITE, lambda x, frame: [1.0, 0.5]),
    Assumption("minipar.train.metrics", "routing", BALANCED, lambda x, frame: [0.0] * x.numel()),
    Assumption(
        "minipar.data_parallel.chunk_optimizer",
        "_refresh",
        "nothing but the optimizer writes to weights",
        lambda x, frame: False,
    ),
    Assumption(
        "minipar.model.permute", "plan_kept_rows", BALANCED, lambda x, frame: frame.f_locals["expert"].numel()
    ),
    Assumption("minipar.model.permute", "_gather_or_zero", BALANCED, lambda x, frame: True),
    Assumption(
        "minipar.model.grouped_mlp",
        "grouped_swiglu",
        BALANCED,
        lambda x, frame: _even(x, frame.f_locals["x"].shape[0]),
    ),
    Assumption("minipar.expert.dispatch", "row_counts", BALANCED, _rows_of_every_rank),
    Assumption("minipar.model.fused", "_kernel", "queries and keys are numbers", lambda x, frame: False),
)
