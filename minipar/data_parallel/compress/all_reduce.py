"""The mean of a vector over ranks, in two compressed phases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.data_parallel.compress.error_feedback import ErrorFeedback


class CompressedMean:
    """mean over ranks of x, with error feedback on both sides. The same bits on every rank.

    1. each rank encodes p chunks, and sends chunk r to rank r        all-to-all: (p-1) B bytes sent
    2. rank r decodes and averages them, and encodes the mean         all-gather: (p-1) B bytes sent

    B is the codec's bytes of a chunk, n/p elements rounded up. Plain float32 sends 4 n per phase and p-1 of p parts, so
    signs send about 1/32. Rank r's error of the second phase is fed back too.
    Source: 1-bit Adam, arXiv:2102.02888, section 4.2 (the compressed all-reduce).
    """

    def __init__(self, comm, codec, error_feedback: bool = True):
        self.comm = comm
        self.worker = ErrorFeedback(codec, error_feedback)  # of this rank's vectors
        self.server = ErrorFeedback(codec, error_feedback)  # of the chunk that this rank averages
        self.codec = codec

    @torch.no_grad()
    def __call__(self, x: Tensor, key=0) -> Tensor:
        """Return the mean of x over ranks, in its shape and dtype. `key`: which of the tensors reduced each step it is.

        Raises ArithmeticError where x has nan or inf.
        """
        p = self.comm.size
        flat = x.float().flatten()
        chunks = F.pad(flat, (0, -len(flat) % p)).chunk(p)
        n = len(chunks[0])
        payloads = torch.stack([self.worker.encode((key, r), chunk) for r, chunk in enumerate(chunks)])
        received = self.comm.all_to_all(payloads)
        mean = torch.stack([self.codec.decode(payload, n) for payload in received]).mean(0)
        own = self.server.encode(key, mean)
        gathered = self.comm.all_gather(own[None])
        total = torch.cat([self.codec.decode(payload, n) for payload in gathered])
        return total[: len(flat)].view(x.shape).to(x.dtype)

    def sent_bytes(self, n: int) -> int:
        """The bytes that a rank sends for a vector of n elements, by formula."""
        p = self.comm.size
        return 2 * (p - 1) * self.codec.num_bytes(-(-n // p))

    def state_dict(self) -> dict:
        """Return this rank's residuals: what it has not sent yet. They belong to this rank and this number of ranks."""
        state = {"worker": self.worker.state_dict(), "server": self.server.state_dict()}
        return {**state, "rank": self.comm.rank, "size": self.comm.size}

    def load_state_dict(self, state: dict) -> None:
        """Load this rank's residuals. Raises ValueError for another rank's, or another number of ranks'."""
        if (state["rank"], state["size"]) != (self.comm.rank, self.comm.size):
            raise ValueError(
                f"these residuals are of rank {state['rank']} of {state['size']}; this is rank "
                f"{self.comm.rank} of {self.comm.size}: start without residuals, or on the same ranks"
            )
        self.worker.load_state_dict(state["worker"])
        self.server.load_state_dict(state["server"])
