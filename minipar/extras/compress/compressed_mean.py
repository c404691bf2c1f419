"""The mean of a vector over ranks, in two compressed phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm
from minipar.extras.compress.codecs import Codec
from minipar.extras.compress.error_feedback import ErrorFeedback
from minipar.extras.compress.plain_mean import Means, State, Tensors, cut, unfused
from minipar.extras.compress.residuals import Residuals


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
        self.codec, self.error_feedback = codec, error_feedback
        self.worker = Residuals()  # the error of this rank's vectors
        self.server = ErrorFeedback(codec, error_feedback)  # for the error of the mean of its chunk
        self._of_mean: dict[Any, Tensor] = {}  # loaded errors of means, until a chunk of them is this rank's

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
        p, rank, group = self.comm.size, self.comm.rank, tuple(tensors)
        (wanted,) = self.worker.added_to([tensors])
        padded = _padded(wanted, p)
        n = len(padded) // p
        payloads = torch.stack([self.codec.encode(chunk) for chunk in padded.chunk(p)])
        if self.error_feedback:
            for chunk, payload in zip(padded.chunk(p), payloads):
                chunk -= self.codec.decode(payload, n)
            self.worker.keep([tensors], [padded])
            self._take_loaded(group)
        received = self.comm.all_to_all(payloads)
        mean = torch.stack([self.codec.decode(payload, n) for payload in received]).mean(0)
        own = self.server.encode(group, mean, min(max(len(wanted) - rank * n, 0), n))
        gathered = self.comm.all_gather(own[None])
        return unfused(torch.cat([self.codec.decode(payload, n) for payload in gathered]), tensors)

    @torch.no_grad()
    def scattered_means(self, parts: Sequence[Tensors]) -> Means:
        """Return the means over ranks of this rank's pieces.

        parts  for each rank, the pieces whose mean it keeps, flat, by key; keys and sizes must not change between steps

        Sends to each other rank the codec's bytes for all of its pieces: see `scattered_bytes`.
        """
        p, own = self.comm.size, parts[self.comm.rank]
        if p == 1 or not any(parts):
            return dict(own)
        while self._of_mean:  # the mean is not encoded here, so every rank sends the rest of it
            key, x = self._of_mean.popitem()
            self.worker.residuals[key] = self.worker.residuals[key] + x
        wanted = self.worker.added_to(parts)
        payloads = [self.codec.encode(x) if len(x) else x.to(torch.uint8) for x in wanted]
        if self.error_feedback:
            for x, payload in zip(wanted, payloads):
                if len(x):
                    x -= self.codec.decode(payload, len(x))
            self.worker.keep(parts, wanted)
        sizes = [len(x) for x in payloads]
        received = self.comm.all_to_all(torch.cat(payloads), sizes, [sizes[self.comm.rank]] * p)
        if not own:
            return {}
        n = len(wanted[self.comm.rank])
        return unfused(torch.stack([self.codec.decode(x, n) for x in received.chunk(p)]).mean(0), own)

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
        found = self.worker.state()
        for group, error in self.server.residuals.items():
            like = {key: self.worker.residuals[key] for key in group}
            for key, part in cut(self.comm.all_gather(error), like).items():
                found[key]["residual_of_mean"] = part
        for key, x in self._of_mean.items():
            found[key]["residual_of_mean"] = x
        return found

    def load(self, state: State) -> None:
        """Load a result of `state`. If the number of ranks has changed, pass every rank the mean of all "residual"s."""
        for key, own in state.items():
            self.worker.residuals[key] = own["residual"].flatten()
            if "residual_of_mean" in own:
                self._of_mean[key] = own["residual_of_mean"].flatten()

    def _take_loaded(self, group: tuple[Any, ...]) -> None:
        """Take this rank's chunk of the loaded errors of these tensors' means."""
        if any(key in self._of_mean for key in group):
            residuals = self.worker.residuals
            whole = [self._of_mean.pop(key, torch.zeros_like(residuals[key])) for key in group]
            chunks = _padded(torch.cat(whole), self.comm.size).chunk(self.comm.size)
            self.server.residuals[group] = chunks[self.comm.rank].clone()


def _padded(flat: Tensor, p: int) -> Tensor:
    return F.pad(flat, (0, -len(flat) % p)) if len(flat) % p else flat
