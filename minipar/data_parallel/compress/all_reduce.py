"""The mean of a vector over ranks, in two compressed phases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.data_parallel.compress.error_feedback import ErrorFeedback
from minipar.data_parallel.compress.plain_mean import cut, fused, unfused


class CompressedMean:
    """mean over ranks of x, with error feedback on both sides. The same bits on every rank.

    1. each rank encodes p chunks, and sends chunk r to rank r        all-to-all: (p-1) B bytes sent
    2. rank r decodes and averages them, and encodes the mean         all-gather: (p-1) B bytes sent

    B is the codec's bytes of a chunk, n/p elements rounded up. Plain float32 sends 4 n per phase and p-1 of p parts, so
    signs send about 1/32. Rank r's error of the second phase is fed back too. Over one rank nothing is sent, and nothing
    is compressed.
    Source: the compressed all-reduce of 1-bit Adam, arXiv:2102.02888, in the two phases of DeepSpeed's. There a rank has
    one scale for all p chunks, sent by an all-gather of its own; here each chunk is encoded with its own.
    """

    def __init__(self, comm, codec, error_feedback: bool = True):
        self.comm = comm
        self.worker = ErrorFeedback(codec, error_feedback)  # of this rank's vectors
        self.server = ErrorFeedback(codec, error_feedback)  # of the chunk that this rank averages
        self.codec = codec
        self._groups: dict[tuple, dict] = {}  # keys reduced together -> {key: a meta tensor of that shape}
        self._loaded: dict = {}

    def __call__(self, x: Tensor, key=0) -> Tensor:
        """Return the mean of x over ranks, in its shape and dtype. `key`: which of the tensors reduced each step it is.

        Raises ArithmeticError where x has nan or inf.
        """
        return self.means({key: x})[key]

    @torch.no_grad()
    def means(self, tensors: dict) -> dict:
        """Return the mean over ranks of each tensor, all in one message; see plain_mean.py."""
        if self.comm.size == 1 or not tensors:
            return dict(tensors)
        flat, group = fused(tensors), tuple(tensors)
        if group not in self._groups:
            self._begin(group, tensors)
        return unfused(self._mean(flat, group), tensors)

    def _mean(self, flat: Tensor, group: tuple) -> Tensor:
        chunks = _chunks(flat, self.comm.size)
        n = len(chunks[0])
        held = [min(max(len(flat) - r * n, 0), n) for r in range(self.comm.size)]  # the rest is padding
        payloads = torch.stack(
            [self.worker.encode((group, r), chunk, held[r]) for r, chunk in enumerate(chunks)]
        )
        received = self.comm.all_to_all(payloads)
        mean = torch.stack([self.codec.decode(payload, n) for payload in received]).mean(0)
        own = self.server.encode(group, mean, held[self.comm.rank])
        gathered = self.comm.all_gather(own[None])
        return torch.cat([self.codec.decode(payload, n) for payload in gathered])[: len(flat)]

    def sent_bytes(self, n: int) -> int:
        """The bytes that a rank sends for a vector of n elements, by formula."""
        p = self.comm.size
        return 2 * (p - 1) * self.codec.num_bytes(-(-n // p)) if p > 1 else 0

    # Its state --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state(self) -> dict:
        """Return, by key, "residual" and "residual_of_mean": what this rank has not sent, and what the mean lacks.

        The mean over ranks of "residual", plus "residual_of_mean", is all that is missing. All-gathers 4 bytes an element.
        """
        found: dict = dict(self._loaded)
        for group, shapes in self._groups.items():
            if (group, 0) not in self.worker.residuals:
                continue
            own = torch.cat([self.worker.residuals[group, r] for r in range(self.comm.size)])
            mean = self.comm.all_gather(self.server.residuals[group])
            for name, flat in (("residual", own), ("residual_of_mean", mean)):
                for key, part in cut(flat, shapes).items():
                    found.setdefault(key, {})[name] = part
        return found

    def load(self, state: dict) -> None:
        """Load what `state` returned; on another number of ranks, give each the mean of the residuals."""
        self._loaded = dict(state)

    def _begin(self, group: tuple, tensors: dict) -> None:
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
