"""The mean of a vector over ranks, in two compressed phases."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.extras.compress.codecs import Codec, require_finite
from minipar.extras.compress.plain_mean import Compressor, Means, State, Tensors, cut, fused, unfused
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
    ZeRO++ does the first phase alone, as its reduce-scatter, with block-quantized integers and without feedback:
    arXiv:2306.10209, section 3.3.
    """

    def __init__(self, comm: Comm, codec: Codec, error_feedback: bool = True):
        self.comm = comm
        self.codec, self.error_feedback = codec, error_feedback
        self.worker: Means = {}  # by key: what this rank has not sent of its tensor
        self.server: Means = {}  # by the keys of a message: the error of the mean of this rank's chunk
        self._of_mean: Means = {}  # loaded errors of means, until a chunk of them is this rank's

    def _means(self, tensors: Tensors) -> Means:
        rank, group, wanted = self.comm.rank, tuple(tensors), fused(tensors)
        require_finite(wanted, "a gradient")
        for key, x in cut(wanted, tensors).items():
            x += self.worker.get(key, 0)
        sizes = chunk_sizes(len(wanted), self.comm.size)
        lengths = [self.codec.num_bytes(n) if n else 0 for n in sizes]
        payloads = [self._encoded(x) for x in wanted.split(sizes)]
        if self.error_feedback:
            self.worker |= cut(wanted - self._decoded(payloads, sizes), tensors)
        own = [lengths[rank]] * self.comm.size
        received = self.comm.all_to_all(torch.cat(payloads), lengths, own).split(own)
        mean = torch.stack([self._decoded([x], sizes[rank : rank + 1]) for x in received]).mean(0)
        require_finite(mean, "a mean of gradients")
        if any(key in self._of_mean for key in group):
            whole = {key: self._of_mean.pop(key, torch.zeros_like(x)) for key, x in tensors.items()}
            self.server[group] = fused(whole).split(sizes)[rank].clone()
        mean += self.server.get(group, 0)
        payload = self._encoded(mean)
        if self.error_feedback:
            self.server[group] = mean - self._decoded([payload], sizes[rank : rank + 1])
        payloads = self.comm.all_gather(payload, lengths).split(lengths)
        return unfused(self._decoded(payloads, sizes), tensors)

    def _encoded(self, x: Tensor) -> Tensor:
        return self.codec.encode(x) if len(x) else x.to(torch.uint8)

    def _decoded(self, payloads: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        found = [self.codec.decode(x, n) if n else x.float() for x, n in zip(payloads, sizes)]
        return torch.cat(found)

    # Its state --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state(self) -> State:
        """Return, by key, "residual" (what this rank has not sent) and "residual_of_mean" (the error of the mean).

        The mean of "residual" over ranks, plus "residual_of_mean", is all that was not sent. All-gathers 4 bytes per
        element.
        """
        found = {key: {"residual": x} for key, x in self.worker.items()}
        for group, error in self.server.items():
            like = {key: self.worker[key] for key in group}
            sizes = chunk_sizes(sum(x.numel() for x in like.values()), self.comm.size)
            for key, part in cut(self.comm.all_gather(error, sizes), like).items():
                found[key]["residual_of_mean"] = part
        for key, x in self._of_mean.items():
            found[key]["residual_of_mean"] = x
        return found

    def load(self, state: State) -> None:
        """Load a result of `state`. If the number of ranks has changed, pass every rank the mean of all "residual"s."""
        for key, own in state.items():
            self.worker[key] = own["residual"]
            if "residual_of_mean" in own:
                self._of_mean[key] = own["residual_of_mean"]
