"""The mean over ranks of each rank's largest elements, whose sketches are added on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.extras.compress.codecs import pack_bits, unpack_bits
from minipar.extras.compress.compressed_buckets import chunked
from minipar.extras.compress.plain_mean import Compressor, Means, State, Tensors, unfused
from minipar.extras.compress.residuals import Residuals
from minipar.extras.compress.sketch import Sketch, num_cells
from minipar.extras.compress.threshold import Choose


class SketchedMean(Compressor):
    """The mean over ranks of what each rank keeps of x: its largest elements. Elements that cannot be recovered are 0.

    The n elements are cut into p chunks, and rank r gets the sums of chunk r:

    1. each rank keeps its largest elements, and sends a bit for every element   all-to-all: (p-1) n/(8p) bytes sent
    2. ranks combine the bits by "or": the places of the sketches                all-gather: (p-1) n/(8p)
    3. ranks add up the sketches, each with ratio n/p cells for a chunk          reduce-scatter: (p-1) 4 ratio n/p
    4. each rank sends the recovered sums of its chunk                           all-gather: (p-1) 4 bytes for each sum

    Any reduce-scatter adds sketches, also inside a switch; values with indices cannot be added that way. But a sketch must
    hold the places of all ranks together: if p ranks keep a fraction f each, up to p f of the elements, of which it can
    recover 0.818 ratio. With error feedback, each rank adds to its next vector what it did not keep and what was not
    recovered. With one rank, nothing is sent or compressed. Under ZeRO-2 and -3, `scattered_means` does phases 1 to 3.
    Raises ArithmeticError if a tensor has nan or inf.
    Sources: TAGC, arXiv:2504.05638, and LHC, arXiv:2402.07529; both read in their authors' code. With one bit an element,
    TAGC's code sums the bytes of bits, so that a second rank's bit carries into the next element's; here they are or-ed.
    """

    scatters = True

    def __init__(self, comm: Comm, choose: Choose, ratio: float, error_feedback: bool = True):
        self.comm, self.choose, self.ratio, self.error_feedback = comm, choose, ratio, error_feedback
        self.worker = Residuals()

    def _means(self, tensors: Tensors) -> Means:
        own, sketches = self._own_mean(chunked(tensors, self.comm.size))
        recovered = torch.cat([sketch.recovered for sketch in sketches])
        counts = [int(sketch.recovered.sum()) for sketch in sketches]
        mean = own.new_zeros(len(recovered))
        mean[recovered] = self.comm.all_gather(own[sketches[self.comm.rank].recovered], counts)
        return unfused(mean, tensors)

    def _scattered(self, parts: Sequence[Tensors]) -> Tensor:
        return self._own_mean(parts)[0]

    def _own_mean(self, parts: Sequence[Tensors]) -> tuple[Tensor, list[Sketch]]:
        """Return the mean of this rank's pieces, fused, and the sketches of all ranks' pieces."""
        wanted = self.worker.added_to(parts)
        chosen = [self.choose(x) for x in wanted]
        sketches = [Sketch(place, num_cells(len(place), self.ratio)) for place in self._places(chosen)]
        sums = [sketch.of(x * mask) for sketch, x, mask in zip(sketches, wanted, chosen)]
        own = self.comm.reduce_scatter(torch.cat(sums), "mean", [len(x) for x in sums])
        if self.error_feedback:
            sent = [mask & sketch.recovered for mask, sketch in zip(chosen, sketches)]
            self.worker.keep(parts, [x.masked_fill(mask, 0.0) for x, mask in zip(wanted, sent)])
        return sketches[self.comm.rank].recover(own), sketches

    def _places(self, chosen: list[Tensor]) -> list[Tensor]:
        """Return for each rank's pieces the elements that any rank has chosen."""
        bits = [pack_bits(x) for x in chosen]
        sizes = [len(x) for x in bits]
        own = self.comm.all_to_all(torch.cat(bits), sizes, [sizes[self.comm.rank]] * self.comm.size)
        union = own.new_zeros(sizes[self.comm.rank])
        for one in own.view(self.comm.size, -1):
            union |= one
        everywhere = self.comm.all_gather(union, sizes).split(sizes)
        return [unpack_bits(packed, len(x)) for packed, x in zip(everywhere, chosen)]

    def state(self) -> State:
        """Return "residual" by key: what this rank has not sent, or what was not recovered."""
        return self.worker.state()

    def load(self, state: State) -> None:
        """Load a state, also of a `CompressedMean`: the error of a mean is then added to every rank's residual."""
        for key, own in state.items():
            self.worker.residuals[key] = torch.stack(list(own.values())).sum(0).flatten()
