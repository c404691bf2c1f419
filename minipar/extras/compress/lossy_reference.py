"""The reference of a mesh with lossy `--compress`: one process repeats each step from the mesh's own weights.

A compressor rounds values that depend on the order of additions, so two runs drift apart. So each step is compared
separately:

    gradients   one process computes gradients at the mesh's weights. The tensors that the mesh's ranks gave to the
                compressor, or kept, must sum to these. If replicas have different weights, each has its own gradients
    averages    one process computes the means that the compressor must return, from all residuals and all ranks' tensors
    weights     one process updates every rank's weights by its gradients and these averages
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.extras.compress.one_process import Average
from minipar.extras.compress.plain_mean import Compressor, Means
from minipar.extras.compress.plain_mean import Tensors as Keyed
from minipar.extras.compress.run_state import Compressed, means_in_one_process
from minipar.mesh import Mesh, Placement, placement_of, set_placement
from minipar.model import update_balance_bias
from minipar.runtime.launch import run
from minipar.train.checkpoint.initial_weights import whole_model
from minipar.train.data.text import Text, batch_of
from minipar.train.optim import BETAS, OptimizerFamily, learning_rate
from minipar.train.parallelize import RankState
from minipar.train.verification.rounded_reference import (
    TOLERANCE,
    Held,
    Tensors,
    allowed,
    gradients_at,
    is_rounded,
    whole,
)
from minipar.train.verification.verify import (
    UPDATE_TOLERANCE,
    Compared,
    Observed,
    Row,
    number_row,
    parts_row,
    tensor_row,
)

Part = tuple[int, Placement, Tensor]  # of a tensor on a rank
Message = list[Average]  # one averaging call, as recorded by each rank of a Comm, in rank order


# On the mesh ----------------------------------------------------------------------------------------------------------


class _Recorded(Compressor):
    """A compressor that records every message in a list."""

    def __init__(self, compressor: Compressor, comm: Comm, is_compressed: bool, messages: list[Average]):
        self.compressor, self.comm, self.messages = compressor, comm, messages
        self.is_compressed = is_compressed

    def means(self, tensors: Keyed) -> Means:
        given = [x.clone() for x in tensors.values()]
        means = self.compressor.means(tensors)
        places, got = [placement_of(p) for p in tensors], [means[p].clone() for p in tensors]
        self.messages.append(Average(self.comm.name, self.comm.ranks, self.is_compressed, places, given, got))
        return means


def record_messages(state: RankState) -> list[Average]:
    """Return a list to which every later message of this rank's compressors is appended."""
    assert isinstance(state.averaging, Compressed)
    messages: list[Average] = []

    def recorded(make: Callable[[Comm], Compressor], is_compressed: bool, comm: Comm) -> Compressor:
        return _Recorded(make(comm), comm, is_compressed, messages)

    for is_compressed, own in ((True, state.averaging.compressors), (False, state.averaging.plain)):
        for compressors in own:
            compressors.make = partial(recorded, compressors.make, is_compressed)
    return messages


# In one process -------------------------------------------------------------------------------------------------------


class Replay:
    """The models, residuals and optimizers in one process: one optimizer, or one per rank if each rank has its own.

    seen  what every rank of the mesh had
    """

    def __init__(self, config: TrainConfig, text: Text, seen: list[Observed[Held]]):
        self.config, self.text, self.seen, self.choice = config, text, seen, config.choice("compress")
        self.model = whole_model(config)
        self.exact = (
            whole_model(config, config.torch_master_dtype, products=False) if is_rounded(config) else None
        )
        self.means = means_in_one_process(config)
        family: OptimizerFamily = config.choice("optimizer").load()
        self.masters = {name: nn.Parameter(w.clone()) for name, w in whole(self.held(0)).items()}
        groups = family.groups(self.masters.items(), config.weight_decay)
        options: dict[str, Any] = {"lr": config.lr, "betas": BETAS}
        self.optimizer = family.optimizer_class()(groups, **options)
        self.ranks = []
        if self.choice.averages != "gradient":
            before = self.held(0)
            self.ranks = [_Rank(config, rank, before[rank], own.messages) for rank, own in enumerate(seen)]

    def held(self, i: int) -> list[Held]:
        """Return the tensors of all ranks in snapshot i."""
        return [[*own.snapshots.values()][i] for own in self.seen]

    def step(self, step: int) -> list[Row]:
        """Repeat a step from every rank's weights before it, gradients and messages; compare it with the mesh's."""
        config = self.config
        before, gradients, after = (self.held(2 * step + i) for i in range(3))
        lr = learning_rate(step, config.steps, config.highest_lr, config.warmup)
        norm = _norm(gradients)
        divisor = (norm + 1e-6) / config.grad_clip if 0 < config.grad_clip < norm else 1.0
        sent = _by_message([own.messages[step] for own in self.seen])
        means = [self.means(message) for message in sent]
        keeps_own = self.choice.keeps_own_gradients(config, step)
        alone = keeps_own and self.choice.steps_locally
        loss, wanted, limits = self._gradients(step, before, config.dp if alone else 1)
        if alone:
            found = _flat(gradients)
        elif keeps_own:
            found = _means_of_parts(gradients)
        else:
            sums = [[_total(xs) for xs in zip(*(one.given for one in message))] for message in sent]
            found = self._complete(sent, sums, gradients)
        compared = [_compared(rank, place, x, wanted[rank]) for rank, place, x in found]
        averages, weights = [], []
        if not self.ranks:
            sums = [[x * len(message) for x in own] for message, own in zip(sent, means)]
            averages = self._averages(sent, sums, gradients)
            _take_step(self.optimizer, self.masters, whole(before), whole(gradients), lr, divisor)
            updated = {name: master.detach().clone() for name, master in self.masters.items()}
            weights = [_compared(rank, place, x, updated) for rank, place, x in _flat(after)]
        mean_of = {id(one): own for message, own in zip(sent, means) for one in message}
        for rank, replay in enumerate(self.ranks):
            own_means = [(one, mean_of[id(one)]) for one in self.seen[rank].messages[step]]
            weights += replay.step(lr, divisor, before[rank], after[rank], gradients[rank], own_means)
            averages += replay.averages
        losses, norms = ([getattr(own, name)[step] for own in self.seen] for name in ("losses", "norms"))
        # In mixed precision a mean may be rounded once more, to the dtype of the gradients.
        unit = torch.finfo(config.torch_dtype).eps if config.mixed_precision else UPDATE_TOLERANCE
        of_averages = [parts_row(config, f"averages, step {step}", averages, unit)] if averages else []
        return [
            number_row(f"loss, step {step}", losses, loss, limits["loss"]),
            parts_row(config, f"gradients, step {step}", compared, limits),
            number_row(f"gradient norm, step {step}", norms, norm, UPDATE_TOLERANCE),
            *of_averages,
            parts_row(config, f"weights, step {step}", weights, UPDATE_TOLERANCE),
        ]

    def _gradients(
        self, step: int, before: list[Held], replicas: int
    ) -> tuple[float, list[Tensors], dict[str, float]]:
        """Return the batch's loss, for each rank the gradients of its replica's samples at its weights, and the limits.

        replicas  1 if all ranks have the same weights: then they are the gradients of the whole batch
        """
        config = self.config
        batch = batch_of(config, self.text, step)
        mesh = Mesh(config.world_size, **config.mesh_sizes)
        replica = [mesh.coordinates_of(r).dp * replicas // config.dp for r in range(config.world_size)]
        groups = (
            config.model.num_groups(config.batch_size, config.seq_len) if config.model.num_experts else None
        )
        total, found, limits = 0.0, [], {}
        for i, ids in enumerate(torch.arange(config.batch_size).chunk(replicas)):
            weights = whole([held for held, of in zip(before, replica) if of == i])
            part = batch.samples(ids)
            how: dict[str, Any] = {"num_groups": groups, "sample_ids": ids}
            loss, own = gradients_at(self.model, weights, part, step, **how)
            limits = dict.fromkeys((*own, "loss"), TOLERANCE.get(config.dtype, 0.0))
            if self.exact is not None and replicas == 1:
                copies = {name: p.detach() for name, p in self.model.named_parameters()}
                limits = allowed(config, (loss, own), gradients_at(self.exact, copies, part, step, **how))
            total += loss
            found.append({name: g * replicas for name, g in own.items()})
        if config.model.balance_bias:
            update_balance_bias(self.model)
            if self.exact is not None:
                self.exact.load_state_dict(dict(self.model.named_buffers()), strict=False)
        return total, [found[of] for of in replica], limits

    def _complete(self, sent: list[Message], sums: list[list[Tensor]], gradients: list[Held]) -> list[Part]:
        """Return the sums of messages, and the gradients that are in no message.

        With ZeRO 0 and 3, the gradients of a tied weight's two copies are added after they are averaged.
        """
        found = [
            (rank, place, total)
            for message, own in zip(sent, sums)
            for rank in message[0].ranks
            for place, total in zip(message[0].placements, own)
        ]
        known = {(rank, place.name) for rank, place, _ in found}
        tied = {place.tied_to for _, place, _ in found} - {None} if self.config.zero in (0, 3) else set()
        ends: dict[object, dict[bool, Tensor]] = defaultdict(dict)
        for _, place, total in found:
            ends[_name(place), place.start, place.length].setdefault(place.tied_to is None, total)
        found = [
            (rank, place, _total(ends[_name(place), place.start, place.length].values()))
            if _name(place) in tied
            else (rank, place, total)
            for rank, place, total in found
        ]
        return found + [part for part in _flat(gradients) if (part[0], part[1].name) not in known]

    def _averages(
        self, sent: list[Message], sums: list[list[Tensor]], gradients: list[Held]
    ) -> list[Compared]:
        """Compare every rank's gradients with the averages that the compressor must return."""
        if not sent:
            return []
        by_rank: list[Held] = [[] for _ in gradients]
        for rank, place, total in self._complete(sent, sums, gradients):
            by_rank[rank].append((place, total.to(self.config.torch_master_dtype)))
        wanted = whole(by_rank)
        return [_compared(rank, place, x, wanted) for rank, place, x in _flat(gradients)]


class _Replayed(Compressor):
    """A compressor in one process, which returns means that were computed before, and records the tensors it is given."""

    def __init__(self, rank: _Rank):
        self.rank = rank

    def means(self, tensors: Keyed) -> Means:
        message, means = self.rank.left.pop(0)
        assert [place.name for place in message.placements] == [placement_of(p).name for p in tensors]
        self.rank.averages += [
            Compared(self.rank.rank, place, got, want.clone())
            for place, got, want in zip(message.placements, message.given, tensors.values())
        ]
        return dict(zip(tensors, (x.clone() for x in means)))


class _Group(NamedTuple):
    """The part of a Comm that an optimizer needs if it sends nothing."""

    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


class _Rank:
    """The optimizer of one rank, emulated in the reference process, for a method that averages momenta or weights."""

    def __init__(self, config: TrainConfig, rank: int, before: Held, messages: Sequence[list[Average]]):
        self.rank = rank
        self.left: list[tuple[Average, list[Tensor]]] = []
        self.averages: list[Compared] = []
        self.params: dict[str, nn.Parameter] = {}
        for place, x in before:
            self.params[place.name] = nn.Parameter(x.clone())
            set_placement(self.params[place.name], place)
        of_name: dict[str, Any] = {}
        for message in chain.from_iterable(messages):
            group = _Group(message.comm, message.ranks)
            of_name |= dict.fromkeys((place.name for place in message.placements), group)
        averaging = Compressed(config)
        family: OptimizerFamily = config.choice("optimizer").load()
        optimizer = averaging.make_optimizer(
            family.groups(self.params.items(), config.weight_decay),
            family.optimizer_class(),
            lambda p: of_name.get(placement_of(p).name, _Group("alone", (rank,))),
            lr=config.lr,
            betas=BETAS,
        )
        assert optimizer is not None
        self.optimizer = optimizer
        for compressors in averaging.compressors + averaging.plain:
            compressors.make = lambda comm: _Replayed(self)

    def step(
        self, lr: float, divisor: float, before: Held, after: Held, gradients: Held,
        means: list[tuple[Average, list[Tensor]]],
    ) -> list[Compared]:  # fmt: skip
        """Take a step from the mesh's weights with this rank's gradients; compare the weights after it.

        `averages` then has what this rank gave to its compressors and the means that it got, each with what they must be.
        """
        self.left = list(means)
        self.averages = [
            Compared(self.rank, place, got, want)
            for message, own in means
            for place, got, want in zip(message.placements, message.got, own)
        ]
        held, found = ({place.name: x for place, x in own} for own in (before, gradients))
        _take_step(self.optimizer, self.params, held, found, lr, divisor)
        assert not self.left, "a message that one process does not send"
        return [Compared(self.rank, place, x, self.params[place.name].detach().clone()) for place, x in after]


def _take_step(
    optimizer: Any, params: Mapping[str, nn.Parameter], weights: Tensors, gradients: Tensors, lr: float, divisor: float
) -> None:  # fmt: skip
    """Update these parameters, in place, from these weights by these gradients."""
    for name, param in params.items():
        param.data.copy_(weights[name])
        param.grad = gradients[name] / divisor if name in gradients else None
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


# Helpers over all ranks -----------------------------------------------------------------------------------------------


def _by_message(messages: list[list[Average]]) -> list[Message]:
    """Group the messages of a step: return, for each averaging call, the messages of all ranks of its Comm."""
    found: dict[object, Message] = {}
    for own in messages:
        seen: Counter[object] = Counter()
        for one in own:
            key = one.comm, one.ranks, tuple(place.name for place in one.placements)
            found.setdefault((*key, seen[key]), []).append(one)
            seen[key] += 1
    for message in found.values():
        assert len(message) == len(message[0].ranks), "a message that some ranks have not sent"
    return list(found.values())


def _flat(held_by_rank: list[Held]) -> list[Part]:
    return [(rank, place, x) for rank, held in enumerate(held_by_rank) for place, x in held]


def _name(place: Placement) -> str:
    return place.tied_to or place.name


def _compared(rank: int, place: Placement, x: Tensor, wanted: Tensors) -> Compared:
    return Compared(rank, place, x, place.slice_of(wanted[_name(place)]))


def _total(xs: Any) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def _means_of_parts(gradients: list[Held]) -> list[Part]:
    """Return each part's mean over all ranks that hold it."""
    held: dict[object, list[Part]] = defaultdict(list)
    for rank, place, x in _flat(gradients):
        held[place.tied_to, place.part].append((rank, place, x))
    return [(*parts[0][:2], torch.stack([x for *_, x in parts]).mean(0)) for parts in held.values()]


def _norm(gradients: list[Held]) -> float:
    """Return the norm of the whole model's gradients. A part on several ranks counts once: as its mean squared norm."""
    held: dict[object, list[float]] = defaultdict(list)
    for place, x in chain.from_iterable(gradients):
        if place.tied_to is None:
            held[place.part].append(x.double().square().sum().item())
    return math.sqrt(sum(sum(squares) / len(squares) for squares in held.values()))


# The table ------------------------------------------------------------------------------------------------------------


def lossy_rows(config: TrainConfig, text: Text, seen: list[Observed[Held]]) -> list[Row]:
    """Compare each step of a run with compression with one process that starts from the run's own weights."""
    rows: list[Row] = run(_rows, config, text, seen, world_size=1)[0]
    return rows


def _rows(world: Comm, config: TrainConfig, text: Text, seen: list[Observed[Held]]) -> list[Row]:
    replay = Replay(config, text, seen)
    initial = {n: p.detach().to(config.torch_master_dtype) for n, p in replay.model.named_parameters()}
    first = tensor_row(config, "initial weights", replay.held(0), initial, UPDATE_TOLERANCE)
    return [first, *chain.from_iterable(replay.step(step) for step in range(config.steps))]
