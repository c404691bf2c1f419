"""A forward of the model on a mesh: through the stages of pp, to new tokens that all ranks know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.inference.blocks import Rows
from minipar.inference.paged_model import PagedModel
from minipar.inference.split_keys import gather_logits
from minipar.mesh import Mesh


def _axes_of_one_text(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which ranks work on the same requests; along other axes, each replica serves its own."""
    if mesh.sizes["cp"] > 1:
        return "pp", "cp", "tp"
    return ("pp", "ep", "tp") if mesh.sizes["ep"] > 1 else ("pp", "tp")


class Answer:
    """The tokens of a step, and its time on the rank that chooses tokens. The message with both may still be in flight."""

    def __init__(self, told: Tensor | Any, shape: torch.Size, sent: Any = None):
        self.told, self.shape, self.sent = told, shape, sent

    def wait(self) -> tuple[Tensor, float]:
        """Wait for the tokens and the time; return both."""
        if self.sent is not None:
            self.sent.wait()
        told = self.told if isinstance(self.told, Tensor) else self.told.wait().cpu()
        return told[:-1].view(self.shape), told[-1:].view(torch.float64).item()


class Stages:
    """This rank's pipeline stage and its messages; without a mesh, the whole model.

    A step of N tokens, in which n requests get new tokens and have at most g drafts each, sends:

    from stage to stage   N D elements
    over tp               the messages of a forward of N tokens, including the gather of logits
    over cp and ep        see `split_keys.py` and `expert_shares.py`; over cp also the logits from which tokens are chosen
    to all ranks          8 n (g + 1) bytes of tokens and 8 of the step's time, in one broadcast
    """

    def __init__(self, paged: PagedModel, mesh: Mesh | None):
        self.paged = paged
        self.pp = None if mesh is None else mesh.comm("pp")
        self.ranks = None if mesh is None else mesh.comm(*_axes_of_one_text(mesh))
        # The first rank of the last stage chooses the tokens, because it has the logits.
        self.chooser = 0
        if mesh is not None and self.ranks is not None:
            self.chooser = self.ranks.size - self.ranks.size // mesh.sizes["pp"]
        # The tp ranks have the same logits, so only one of them sends its logits to the chooser.
        self.sends_logits = mesh is not None and mesh.coordinates.tp == 0
        self._sent: Any = None  # the handle of the last message from this stage to the next

    @property
    def chooses(self) -> bool:
        return self.ranks is None or self.ranks.rank == self.chooser

    def logits(self, rows: Sequence[Rows]) -> Tensor | None:
        """Run this stage; return the logits [N, V] of the tokens on the rank that chooses; other ranks may return None.

        A stage does not wait until the next one has received its output. Under cp, rows from which no token is chosen are
        0.
        """
        stage, pp, hidden = self.paged.model, self.pp, None
        if not stage.first:
            assert pp is not None
            shape = self.paged.num_rows(rows), 1, stage.config.dim
            hidden = pp.recv(shape, next(stage.parameters()).dtype, pp.rank - 1)
        out = self.paged(rows, hidden)
        if stage.last and self.paged.cp is not None:
            return gather_logits(self.paged.cp, rows, out) if self.sends_logits else None
        if stage.last:
            return out
        assert pp is not None
        self._sent = pp.send(out, pp.rank + 1, async_op=True)
        return None

    def tell(self, chosen: Tensor, seconds: float) -> Answer:
        """Broadcast the chosen tokens and the time from the rank that chooses, so that all ranks continue with the same.

        chosen  [n, g + 1] int64, of the same shape on all ranks

        No rank waits here, since the last stage may be several steps behind the first one.
        """
        here = torch.cat([chosen.flatten(), torch.tensor([seconds], dtype=torch.float64).view(torch.int64)])
        if self.ranks is None:
            return Answer(here, chosen.shape)
        told = self.ranks.broadcast(here.to(self.paged.device), root=self.chooser, async_op=True)
        sent, self._sent = self._sent, None
        return Answer(told, chosen.shape, sent)
