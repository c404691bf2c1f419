"""The mean of a vector over ranks, in two compressed phases."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm
from minipar.extras.compress.codecs import Codec
from minipar.extras.compress.error_feedback import ErrorFeedback
from minipar.extras.compress.piece_residuals import Group, PieceResiduals
from minipar.extras.compress.plain_mean import Means, State, Tensors, cut, fused, unfused


class CompressedMean:
    """The mean of x over ranks, with error feedback in both phases. The result is bitwise equal on every rank.

    1. each rank encodes p chunks, and sends chunk r to rank r                 all-to-all: (p-1) B bytes sent
    2. rank r decodes and averages the chunks r of all, and encodes the mean   all-gather: (p-1) B bytes sent

    B is the codec's bytes for a chunk of n/p elements, rounded up. Uncompressed float32 sends (p-1)/p 4n bytes per phase,
    so signs send about 1/32 of that. Rank r feeds back the error of the second phase, too. With one rank, nothing is sent
    or compressed.
    Source: the compressed all-reduce of 1-bit Adam, arXiv:2102.02888, in DeepSpeed's two phases. In DeepSpeed a rank has
    one scale for all p chunks, and sends it by another all-gather; here each chunk has its own scale.

    Under ZeRO-2 and -3 a rank keeps only the mean of its own chunk. `scattered_means` does just the first phase for this:
    it sends half of the bytes, and does not encode the mean. ZeRO++ reduce-scatters gradients in the same way, with
    block-quantized integers and without feedback: arXiv:2306.10209, section 3.3.
    """

    scatters = True

    def __init__(self, comm: Comm, codec: Codec, error_feedback: bool = True):
        self.comm = comm
        self.worker = ErrorFeedback(codec, error_feedback)  # for the error of this rank's vectors
        self.server = ErrorFeedback(codec, error_feedback)  # for the error of the mean of its chunk
        self.codec = codec
        self._groups: dict[Group, Tensors] = {}  # group -> meta tensors of the same shapes
        self._pieces = PieceResiduals(self.worker.residuals)
        self._loaded: State = {}

    def __call__(self, x: Tensor, key: object = 0) -> Tensor:
        """Return the mean of x over ranks, in x's shape and dtype. `key` identifies x among the tensors of a step.

        Raises ArithmeticError if x has nan or inf.
        """
        return self.means({key: x})[key]

    @torch.no_grad()
    def means(self, tensors: Tensors) -> Means:
        """Return the mean over ranks of each tensor, all in one message; see plain_mean.py."""
        if self.comm.size == 1 or not tensors:
            return dict(tensors)
        flat, group = fused(tensors), tuple(tensors)
        if group not in self._groups:
            self._begin(group, tensors)
        return unfused(self._mean(flat, group), tensors)

    def _mean(self, flat: Tensor, group: Group) -> Tensor:
        chunks = _chunks(flat, self.comm.size)
        n = len(chunks[0])
        # The number of elements in each chunk that are not padding.
        held = [min(max(len(flat) - r * n, 0), n) for r in range(self.comm.size)]
        payloads = torch.stack(
            [self.worker.encode((group, r), chunk, held[r]) for r, chunk in enumerate(chunks)]
        )
        received = self.comm.all_to_all(payloads)
        mean = torch.stack([self.codec.decode(payload, n) for payload in received]).mean(0)
        own = self.server.encode(group, mean, held[self.comm.rank])
        gathered = self.comm.all_gather(own[None])
        return torch.cat([self.codec.decode(payload, n) for payload in gathered])[: len(flat)]

    @torch.no_grad()
    def scattered_means(self, parts: Sequence[Tensors]) -> Means:
        """Return the means over ranks of this rank's pieces.

        parts  for each rank, the pieces whose mean it keeps, flat, by key; keys and sizes must not change between steps

        Sends to each other rank the codec's bytes for all of its pieces: see `scattered_bytes`.
        """
        rank = self.comm.rank
        if self.comm.size == 1:
            return dict(parts[0])
        group = self._pieces.begin(parts, self._loaded)
        payloads = [
            self.worker.encode((group, r), fused(part)) if part else self._nothing()
            for r, part in enumerate(parts)
        ]
        received = self.comm.all_to_all(
            torch.cat(payloads), [len(x) for x in payloads], [len(payloads[rank])] * self.comm.size
        )
        if not parts[rank]:
            return {}
        n = sum(map(len, parts[rank].values()))
        mean = torch.stack([self.codec.decode(x, n) for x in received.chunk(self.comm.size)]).mean(0)
        return unfused(mean, parts[rank])

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.comm.device)

    def scattered_bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes that this rank sends in `scattered_means` if rank r keeps sizes[r] elements."""
        others = [n for r, n in enumerate(sizes) if r != self.comm.rank]
        return sum(self.codec.num_bytes(n) for n in others if n)

    def sent_bytes(self, n: int) -> int:
        """Return the bytes that a rank sends for a vector of n elements."""
        p = self.comm.size
        return 2 * (p - 1) * self.codec.num_bytes(-(-n // p)) if p > 1 else 0

    # Its state --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state(self) -> State:
        """Return, by key, "residual" (what this rank has not sent) and "residual_of_mean" (the error of the mean).

        The mean of "residual" over ranks, plus "residual_of_mean", is all that was not sent. All-gathers 4 bytes per
        element.
        """
        found = dict(self._loaded)
        for group, shapes in self._groups.items():
            if (group, 0) not in self.worker.residuals:
                continue
            own = torch.cat([self.worker.residuals[group, r] for r in range(self.comm.size)])
            mean = self.comm.all_gather(self.server.residuals[group])
            for name, flat in (("residual", own), ("residual_of_mean", mean)):
                for key, part in cut(flat, shapes).items():
                    found.setdefault(key, {})[name] = part
        self._pieces.add_to(found)
        return found

    def load(self, state: State) -> None:
        """Load a result of `state`. If the number of ranks has changed, pass every rank the mean of all "residual"s."""
        self._loaded = dict(state)

    def _begin(self, group: Group, tensors: Tensors) -> None:
        self._groups[group] = {key: torch.empty_like(x, device="meta") for key, x in tensors.items()}
        states = {key: self._loaded.pop(key, {}) for key in group}
        for name, feedback in (("residual", self.worker), ("residual_of_mean", self.server)):
            if not any(name in state for state in states.values()):
                continue
            whole = {key: states[key].get(name, torch.zeros_like(x)) for key, x in tensors.items()}
            chunks = _chunks(fused(whole), self.comm.size)
            if feedback is self.worker:
                feedback.residuals |= {(group, r): chunk.clone() for r, chunk in enumerate(chunks)}
            else:
                feedback.residuals[group] = chunks[self.comm.rank].clone()


def _chunks(flat: Tensor, p: int) -> tuple[Tensor, ...]:
    return F.pad(flat, (0, -len(flat) % p)).chunk(p)
