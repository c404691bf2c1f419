"""The mean of a vector over ranks, in two compressed phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.extras.compress.codecs import Codec, require_finite
from minipar.extras.compress.compressed_buckets import chunked
from minipar.extras.compress.plain_mean import Compressor, Means, State, Tensors, cut, fused, unfused
from minipar.extras.compress.residuals import Residuals
from minipar.support.chunks import chunk_sizes


class CompressedMean(Compressor):
    """The mean of x over ranks, with error feedback in both phases. The result is bitwise equal on every rank.

    1. each rank encodes p chunks, and sends chunk r to rank r                 all-to-all: (p-1) B bytes sent
    2. rank r decodes and averages the chunks r of all, and encodes the mean   all-gather: (p-1) B bytes sent

    B is the codec's bytes for a chunk of n/p elements. Uncompressed float32 sends (p-1)/p 4n bytes per phase, so signs send
    about 1/32 of that. Rank r feeds back the error of the second phase, too. With one rank, nothing is sent or compressed.
    Raises ArithmeticError if a tensor has nan or inf.
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
        self.server: dict[
            Any, Tensor
        ] = {}  # by the keys of a message: the error of the mean of this rank's chunk
        self._of_mean: dict[Any, Tensor] = {}  # loaded errors of means, until a chunk of them is this rank's

    def _means(self, tensors: Tensors) -> Means:
        group, parts = tuple(tensors), chunked(tensors, self.comm.size)
        mean, sizes = self._own_mean(parts), [sum(map(len, part.values())) for part in parts]
        require_finite(mean, "a mean of gradients")
        if any(key in self._of_mean for key in group):
            whole = {key: self._of_mean.pop(key, torch.zeros_like(x)) for key, x in tensors.items()}
            self.server[group] = fused(whole).split(sizes)[self.comm.rank].clone()
        mean += self.server.get(group, 0)
        own = self._encoded(mean)
        if self.error_feedback:
            self.server[group] = mean - self._decoded(own, len(mean))
        lengths = [self._num_bytes(n) for n in sizes]
        payloads = self.comm.all_gather(own, lengths).split(lengths)
        return unfused(torch.cat([self._decoded(x, n) for x, n in zip(payloads, sizes)]), tensors)

    def _scattered(self, parts: Sequence[Tensors]) -> Tensor:
        """Send to each other rank the codec's bytes for its pieces."""
        while self._of_mean:  # the mean is not encoded here, so every rank sends the rest of it
            key, x = self._of_mean.popitem()
            self.worker.residuals[key] = self.worker.residuals[key] + x
        return self._own_mean(parts)

    def _own_mean(self, parts: Sequence[Tensors]) -> Tensor:
        """Return the mean over ranks of this rank's pieces, fused."""
        p, rank = self.comm.size, self.comm.rank
        wanted = self.worker.added_to(parts)
        payloads = [self._encoded(x) for x in wanted]
        if self.error_feedback:
            for x, payload in zip(wanted, payloads):
                x -= self._decoded(payload, len(x))
            self.worker.keep(parts, wanted)
        sizes = [len(x) for x in payloads]
        received = self.comm.all_to_all(torch.cat(payloads), sizes, [sizes[rank]] * p)
        return torch.stack([self._decoded(x, len(wanted[rank])) for x in received.view(p, sizes[rank])]).mean(
            0
        )

    def _num_bytes(self, n: int) -> int:
        return self.codec.num_bytes(n) if n else 0

    def _encoded(self, x: Tensor) -> Tensor:
        return self.codec.encode(x) if len(x) else x.to(torch.uint8)

    def _decoded(self, payload: Tensor, n: int) -> Tensor:
        return self.codec.decode(payload, n) if n else payload.float()

    # Its state --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state(self) -> State:
        """Return, by key, "residual" (what this rank has not sent) and "residual_of_mean" (the error of the mean).

        The mean of "residual" over ranks, plus "residual_of_mean", is all that was not sent. All-gathers 4 bytes per
        element.
        """
        found = self.worker.state()
        for group, error in self.server.items():
            like = {key: self.worker.residuals[key] for key in group}
            sizes = chunk_sizes(sum(map(len, like.values())), self.comm.size)
            for key, part in cut(self.comm.all_gather(error, sizes), like).items():
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
