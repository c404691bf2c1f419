"""Mistakes that many judges must find: each makes a wrong implementation of a right one, f(comm, *tensors).

What is given to `right` or comes from it is changed, always or only `when` the call is of one kind.
"""

import torch
from torch import Tensor
from torch.autograd import Function


class Replaced:
    """A Comm, some of whose methods are others."""

    def __init__(self, comm, **methods):
        self.comm = comm
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self.__dict__["comm"], name)


def always(comm, *args):
    return True


def tensors(args):
    return [x for x in args if isinstance(x, Tensor)]


def given(change, when=always):
    """The floating-point tensors that are given are changed, before anything else."""

    def mistake(right):
        def wrong(comm, *args, **options):
            if when(comm, *args):
                args = [change(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
            return right(comm, *args, **options)

        return wrong

    return mistake


def returned(change, when=always):
    """The tensors that are returned are changed, after everything else."""

    def mistake(right):
        def wrong(comm, *args, **options):
            y = right(comm, *args, **options)
            if not when(comm, *args):
                return y
            return (
                change(y)
                if isinstance(y, Tensor)
                else type(y)(change(x) if isinstance(x, Tensor) else x for x in y)
            )

        return wrong

    return mistake


def has(dtype):
    return lambda comm, *args: any(x.dtype == dtype for x in tensors(args))


def large(comm, *args):
    return any(x.numel() >= 1000 for x in tensors(args))


def many_ranks(comm, *args):
    return comm.size >= 5


def rounded(wide, narrow):
    return lambda x: x.to(narrow).to(x.dtype) if x.dtype == wide else x


def with_dense_strides(x):
    return x if x.is_contiguous() else x.as_strided(x.shape, torch.empty(x.shape).stride())


def nan_as_zero(x):
    return torch.where(x.isnan(), torch.zeros_like(x), x)


class OnesFromAbove(Function):
    """The identity, with a backward that takes the gradient from above for one."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return torch.ones_like(dy)


class ZeroBackward(Function):
    """The identity, with a backward that is zero."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return torch.zeros_like(dy)


class DoubleBackward(Function):
    """The identity, with a backward of twice the gradient."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def stale(right):
    """The second call with tensors of the same shapes returns the first one's result."""
    kept = {}

    def wrong(comm, *args, **options):
        key = [tuple(x.shape) for x in tensors(args)], [x for x in args if not isinstance(x, Tensor)]
        key = repr((comm.size, key, options))
        if key not in kept:
            y = right(comm, *args, **options)
            kept[key] = y.detach().clone() if isinstance(y, Tensor) else y
            return y
        y = right(comm, *args, **options)  # so that the other ranks are served
        return kept[key] + 0 * y if isinstance(y, Tensor) else kept[key]

    return wrong


def one_buffer(right):
    """The result is in a buffer that the next call with the same shapes writes to."""
    kept = {}

    def wrong(comm, *args):
        y = right(comm, *args)
        buffer = kept.setdefault((comm.size, y.shape, y.dtype), torch.empty_like(y))
        return buffer.copy_(y)

    return wrong


def writes_to_what_is_given(right):
    def wrong(comm, *args, **options):
        y = right(comm, *[x.clone() if isinstance(x, Tensor) else x for x in args], **options)
        for x in tensors(args):
            if x.is_floating_point():
                x.detach().mul_(2)
        return y

    return wrong


def writes_to_the_first(right):
    def wrong(comm, x, *args, **options):
        y = right(comm, x.clone(), *args, **options)
        x.detach().add_(1)
        return y

    return wrong


def fails_without_elements(right):
    def wrong(comm, *args, **options):
        args[0].flatten()[0]  # IndexError
        return right(comm, *args, **options)

    return wrong


def wrong_for_one_row(right):
    """One row, token or element is taken for none."""

    def wrong(comm, *args, **options):
        y = right(comm, *args, **options)
        if len(args[0]) != 1 or not isinstance(y, Tensor):
            return y
        return y * 0

    return wrong


float64_as_float32 = given(rounded(torch.float64, torch.float32))
float32_as_bfloat16 = given(rounded(torch.float32, torch.bfloat16))
result_in_float32 = returned(lambda y: y.float() if y.is_floating_point() else y)
result_in_float64 = returned(lambda y: y.double() if y.is_floating_point() else y)
zero_from_1000_elements_on = returned(lambda y: y * 0, large)
wrong_from_five_ranks_on = returned(lambda y: y * 2, many_ranks)
backward_wrong_from_five_ranks_on = returned(DoubleBackward.apply, many_ranks)
wrong_in_bfloat16 = returned(lambda y: y * 2, has(torch.bfloat16))
wrong_in_float32 = returned(lambda y: y * 2, has(torch.float32))
ignores_strides = given(with_dense_strides)
nan_is_zero = given(nan_as_zero)
ignores_the_gradient_from_above = returned(OnesFromAbove.apply)


def integers_through_float32(right):
    def wrong(comm, x, *args, **options):
        if x.is_floating_point():
            return right(comm, x, *args, **options)
        return right(comm, x.float(), *args, **options).to(x.dtype)

    return wrong


COLLECTIVE = {  # for what takes one tensor, and is not differentiated
    "float64 as float32": float64_as_float32,
    "float32 as bfloat16": float32_as_bfloat16,
    "zero from 1,000 elements on": zero_from_1000_elements_on,
    "wrong from five ranks on": wrong_from_five_ranks_on,
    "wrong in bfloat16": wrong_in_bfloat16,
    "integers through float32": integers_through_float32,
    "ignores strides": ignores_strides,
    "nan is zero": nan_is_zero,
    "writes to x": writes_to_the_first,
    "fails without elements": fails_without_elements,
    "stale": stale,
    "one buffer": one_buffer,
}
LAYER = {  # for what is differentiated
    "float64 as float32": float64_as_float32,
    "zero from 1,000 elements on": zero_from_1000_elements_on,
    "wrong from five ranks on": wrong_from_five_ranks_on,
    "backward wrong from five ranks on": backward_wrong_from_five_ranks_on,
    "wrong in float32": wrong_in_float32,
    "wrong in bfloat16": wrong_in_bfloat16,
    "ignores strides": ignores_strides,
    "nan is zero": nan_is_zero,
    "ignores the gradient from above": ignores_the_gradient_from_above,
    "stale": stale,
    "writes to what is given": writes_to_what_is_given,
}


def each(mistakes, right, *without):
    return {name: mistake(right) for name, mistake in mistakes.items() if name not in without}
