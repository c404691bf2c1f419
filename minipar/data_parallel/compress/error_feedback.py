"""Error feedback: what compression lost is added to the next vector, so that nothing is lost for long."""

from __future__ import annotations

from torch import Tensor

from minipar.data_parallel.compress.codecs import require_finite


class ErrorFeedback:
    """A codec with memory:   sent = C(x + residual);   residual = x + residual - sent.

    So after T steps the sum of what was sent, plus the residual, is the sum of all x. Without it the signs of a small
    gradient beside a large one are all that training ever sees.
    Holds 4 bytes per element of each key. Source: EF-SignSGD, arXiv:1901.09847, algorithm 2.
    """

    def __init__(self, codec, enabled: bool = True):
        self.codec, self.enabled = codec, enabled
        self.residuals: dict[object, Tensor] = {}

    def encode(self, key, x: Tensor, held: int | None = None) -> Tensor:
        """Return the bytes of x [n], float32, plus what is left of earlier vectors with this key.

        held  of the n elements; the others are padding, of which nothing is missed

        Raises ArithmeticError where x is not finite; the residual is then as before.
        """
        require_finite(x, "a gradient")
        wanted = x + self.residuals[key] if key in self.residuals else x
        payload = self.codec.encode(wanted)
        if self.enabled:
            self.residuals[key] = wanted - self.codec.decode(payload, len(x))
            if held is not None:
                self.residuals[key][held:] = 0
        return payload

    def state_dict(self) -> dict:
        return {"residuals": dict(self.residuals)}

    def load_state_dict(self, state: dict) -> None:
        self.residuals = dict(state["residuals"])
