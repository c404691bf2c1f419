"""Rows of tokens sent to experts in slices: each tp rank sends 1/tp of the features of a row, not the whole row.

With experts split over tp, the tp ranks of one dp rank route the same tokens alike, and so would send the same rows. Here

    x           [T, D]     the same on every tp rank
    slice       [T, D/tp]  this rank's features, which are permuted, dispatched and combined
    experts     all-gather over tp -> rows [R, D];  experts on F/tp features;  reduce-scatter over tp -> [R, D/tp]
    y           all-gather over tp of the combined slices: one row per token

Source: duplicate token dropping, of TED, arXiv:2303.06318, which slices tokens, not features, to the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from minipar.comm import Comm, autograd
from minipar.config.train_config import TrainConfig
from minipar.model import Transformer
from minipar.model.moe import MoE, moe_layers
from minipar.model.overrides import Dispatched, ExpertFunction
from minipar.tensor_parallel.split_model import cut_stage

FEATURES, TOKENS = -1, 1  # dims of [B, T, D]


def cut_with_sliced_rows(stage: Transformer, tp: Comm, config: TrainConfig) -> None:
    """Cut a stage as the layout 1d does, then let every mixture send its rows in slices: a layout of tp."""
    cut_stage(stage, tp, config)
    for _, moe in moe_layers(stage):
        slice_rows(moe, tp, config.sequence_parallel)


def slice_rows(moe: MoE, tp: Comm, sequence_parallel: bool) -> None:
    """Send the rows of a mixture, whose experts are spread over ep and split over tp, in slices; in place.

    For T tokens of a rank, R rows sent and as many received by the experts, and e bytes an element, sends per forward

        ep   2 (ep-1)/ep R D/tp e          instead of 2 (ep-1)/ep R D e
        tp   (tp-1)/tp (2 R D + T D) e     instead of 2 (tp-1)/tp T D e

    as much in the backward, and there 2 (tp-1)/tp T k e for the combine weights, as before. With sequence parallelism the
    last T D of the forward is T D/tp, and tokens are gathered as before.
    """
    inner = moe.overrides.dispatch
    assert inner is not None, "experts are spread first"
    moe.overrides.dispatch = partial(SlicedRows, inner, tp)
    moe.overrides.copy_input = partial(_slice_or_copy, tp)
    moe.overrides.reduce_output = partial(_features_to_tokens if sequence_parallel else _whole_features, tp)


def _slice_or_copy(tp: Comm, x: Tensor) -> Tensor:
    """Return this rank's features of tokens [B, T, D]; combine weights [M, k] for uses that differ between ranks."""
    return autograd.split(tp, x, dim=FEATURES) if x.dim() == 3 else autograd.copy(tp, x)


def _whole_features(tp: Comm, y: Tensor) -> Tensor:
    return autograd.gather(tp, y, dim=y.dim() + FEATURES)


def _features_to_tokens(tp: Comm, y: Tensor) -> Tensor:
    """Turn a slice of all tokens' features [B, T, D/tp] into all features of a slice of the tokens [B, T/tp, D]."""
    B, T, d = y.shape
    by_rank = autograd.all_to_all(tp, y.transpose(0, TOKENS).contiguous())
    return by_rank.view(tp.size, T // tp.size, B, d).permute(2, 1, 0, 3).reshape(B, T // tp.size, tp.size * d)


class SlicedRows:
    """Slices of rows on their way to the experts, which need whole rows."""

    def __init__(self, inner: Callable[[Tensor, Tensor], Dispatched], tp: Comm, rows: Tensor, counts: Tensor):
        self.tp, self.dispatched = tp, inner(rows, counts)

    def through(self, experts: ExpertFunction) -> Tensor:
        """Return the experts' outputs, this rank's features of them, in the order of the rows."""

        def whole(rows: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
            partial_sums = experts(autograd.all_gather(self.tp, rows, dim=1), counts)
            return autograd.reduce_scatter(self.tp, partial_sums, dim=1)

        return self.dispatched.through(whole)
