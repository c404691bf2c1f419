"""The reference of a mesh with lossy `--compress`: one process repeats each step from the mesh's own weights.

A compressor rounds values that depend on the order of additions, so two runs drift apart. So each step is compared
separately:

    gradients   one process computes gradients at the mesh's weights. The tensors that the mesh's ranks gave to the
                compressor must sum to these
    averages    one process computes the means that the compressor must return, from all residuals and all ranks' tensors
    weights     one process updates the mesh's weights by the mesh's gradients
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.extras.compress.one_process import Average
from minipar.extras.compress.plain_mean import Compressor, Means, Tensors
from minipar.extras.compress.run_state import Compressed, MakeCompressor, means_in_one_process
from minipar.mesh import placement_of
from minipar.train.data.text import Text
from minipar.train.parallelize import RankState
from minipar.train.verification.rounded_reference import Held, whole
from minipar.train.verification.verify import UPDATE_TOLERANCE, Observed, Row, replayed_rows, tensor_row

Message = list[Average]  # one averaging call, as recorded by each rank of a Comm, in rank order


class _Recorded(Compressor):
    """A compressor that records every message in a list."""

    def __init__(self, make: MakeCompressor, messages: list[Average], comm: Comm):
        self.compressor, self.comm, self.messages = make(comm), comm, messages

    def means(self, tensors: Tensors) -> Means:
        given = [x.clone() for x in tensors.values()]
        places = [placement_of(p) for p in tensors]
        self.messages.append(Average(self.comm.name, self.comm.ranks, places, given))
        return self.compressor.means(tensors)


def record_messages(state: RankState) -> list[Average]:
    """Return a list to which every later message of this rank's compressors is appended."""
    assert isinstance(state.averaging, Compressed)
    messages: list[Average] = []
    for compressors in state.averaging.compressors:
        compressors.make = partial(_Recorded, compressors.make, messages)
    return messages


def lossy_rows(config: TrainConfig, text: Text, seen: list[Observed[Held]]) -> list[Row]:
    """Compare each step of a run with compression with one process that starts from the run's own weights."""
    means = means_in_one_process(config)
    # In mixed precision a mean may be rounded once more, to the dtype of the gradients.
    unit = torch.finfo(config.torch_dtype).eps if config.mixed_precision else UPDATE_TOLERANCE

    def averaged(step: int, gradients: list[Held]) -> tuple[list[Held], list[Row]]:
        sent = _by_message([own.messages[step] for own in seen])
        sums = [[torch.stack(xs).sum(0) for xs in zip(*(one.given for one in own))] for own in sent]
        wanted = [[x * len(message) for x in means(message)] for message in sent]
        wide = config.torch_master_dtype
        of_means = whole(
            [[(p, x.to(wide)) for p, x in own] for own in _held(config, sent, wanted, gradients)]
        )
        row = tensor_row(config, f"averages, step {step}", gradients, of_means, unit)
        return _held(config, sent, sums, gradients), [row] if sent else []

    return replayed_rows(config, text, seen, averaged)


def _by_message(messages: list[list[Average]]) -> list[Message]:
    """Group the messages of a step: return, for each averaging call, the messages of all ranks of its Comm."""
    found: dict[object, Message] = {}
    for own in messages:
        for one in own:
            key = one.comm, one.ranks, tuple(place.name for place in one.placements)
            found.setdefault(key, []).append(one)
    for message in found.values():
        assert len(message) == len(message[0].ranks), "a message that some ranks have not sent, or sent twice"
    return list(found.values())


def _held(
    config: TrainConfig, sent: list[Message], totals: list[list[Tensor]], gradients: list[Held]
) -> list[Held]:
    """Return, of each rank, the totals of its messages, and its gradients that are in none.

    With ZeRO 0 and 3, the gradients of a tied weight's two copies are added after they are averaged.
    """
    parts = [
        (message[0].ranks, place, (place.tied_to or place.name, place.start, place.length), x)
        for message, own in zip(sent, totals)
        for place, x in zip(message[0].placements, own)
    ]
    copies: dict[object, dict[str | None, Tensor]] = defaultdict(dict)
    for _, place, key, x in parts:
        copies[key][place.tied_to] = x
    found: list[Held] = [[] for _ in gradients]
    for ranks, place, key, x in parts:
        if config.zero in (0, 3):
            x = sum((other for tied, other in copies[key].items() if tied != place.tied_to), start=x)
        for rank in ranks:
            found[rank].append((place, x))
    for own, held in zip(found, gradients):
        known = {place.name for place, _ in own}
        own += [(place, x) for place, x in held if place.name not in known]
    return found
