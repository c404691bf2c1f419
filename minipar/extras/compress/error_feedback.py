"""Error feedback: add a codec's error to the next vector, so that the lost part is sent later."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minipar.extras.compress.codecs import Codec, require_finite


class ErrorFeedback:
    """A codec with memory:   sent = C(x + residual);   residual = x + residual - sent.

    So after T steps, the sum of all sent vectors, plus the residual, is the sum of all x. Without error feedback, a small
    gradient in a block with large ones would lose its size in every step.
    Holds 4 bytes per element of each key. Source: EF-SignSGD, arXiv:1901.09847, algorithm 2.
    """

    def __init__(self, codec: Codec, enabled: bool = True):
        self.codec, self.enabled = codec, enabled
        self.residuals: dict[Any, Tensor] = {}

    def encode(self, key: object, x: Tensor, held: int | None = None) -> Tensor:
        """Encode x [n], in float32, plus the residual of this key, and keep the error as the new residual.

        held  number of elements before the padding, which gets no residual; None: there is no padding

        Raises ArithmeticError if x is not finite; the residual then stays unchanged.
        """
        require_finite(x, "a gradient")
        wanted = x + self.residuals[key] if key in self.residuals else x
        payload = self.codec.encode(wanted)
        if self.enabled:
            self.residuals[key] = wanted - self.codec.decode(payload, len(x))
            if held is not None:
                self.residuals[key][held:] = 0
        return payload
