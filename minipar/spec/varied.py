"""Kinds of input other than small float64 tensors on a few ranks: other dtypes, sizes, strides, values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minipar.spec.words import RTOL, mismatch

RANKS = (2, 5)  # world sizes on which varied inputs are tried
# The allowed error, relative to the largest entry.
ROUNDING = {torch.float64: RTOL, torch.float32: 1e-4, torch.bfloat16: 0.1}


def strided(x: Tensor) -> Tensor:
    """Return a view equal to x that is not contiguous: every second entry of a longer tensor."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


@dataclass(frozen=True)
class Kind:
    """A kind of input, and its description for a report.

    large     thousands of elements
    strided   the implementation gets views that are not contiguous
    nan       the first entry of the first tensor is nan, and only the result is compared
    scale     factor on the input of a softmax, so that its exp overflows unless the maximum is subtracted
    seed      kinds that differ only in the seed have the same shapes and other values
    rounding  the error allowed, relative to the largest entry; None: the dtype's
    backward  whether gradients are compared; those that a nan reaches depend on the order of sums
    """

    words: str = ""
    dtype: torch.dtype = torch.float64
    large: bool = False
    strided: bool = False
    nan: bool = False
    scale: float = 1.0
    seed: int = 0
    rounding: float | None = None
    backward: bool = True

    def rounded(self, x: Tensor) -> Tensor:
        """Return x in float64, rounded to the dtype."""
        return x.detach().to(self.dtype).double() if x.is_floating_point() else x

    def given(self, x: Tensor, requires_grad: bool = False) -> Tensor:
        """Return x as an implementation gets it: in its dtype, with its strides, in memory of its own."""
        x = x.detach().to(self.dtype if x.is_floating_point() else x.dtype, copy=True)
        x = strided(x) if self.strided else x.contiguous()
        return x.requires_grad_() if requires_grad else x

    def with_nan(self, x: Tensor) -> Tensor:
        """Return x, with a nan as its first entry if `nan` is set."""
        if self.nan:
            x = x.clone()
            x.view(-1)[0] = torch.nan
        return x

    def mismatch(
        self,
        what: str,
        got: object,
        want: Tensor | None,
        size: int = 1,
        whole: Tensor | None = None,
    ) -> str | None:
        """Compare as `words.mismatch` does; `want` is in float64."""
        what = f"{what.removesuffix(',')}, {self.words}," if self.words else what
        want = (
            None if want is None else want.detach().to(self.dtype if want.is_floating_point() else want.dtype)
        )
        if self.dtype == torch.bfloat16 and isinstance(got, Tensor) and got.dtype == torch.float32:
            got = got.to(self.dtype)  # some implementations compute in a wider dtype than their input's
        rounding = ROUNDING[self.dtype] if self.rounding is None else self.rounding
        return mismatch(what, got, want, size, rounding, whole)


PLAIN = Kind()
LARGE = Kind("of thousands of elements", large=True)
AGAIN = Kind("of thousands of elements for the second time", large=True, seed=1)
FLOAT32, BFLOAT16 = Kind("in float32", torch.float32), Kind("in bfloat16", torch.bfloat16)
STRIDED, NAN = Kind("not contiguous", strided=True), Kind("with a nan", nan=True, backward=False)
KINDS = (PLAIN, LARGE, AGAIN, FLOAT32, BFLOAT16, STRIDED, NAN)
