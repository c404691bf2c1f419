"""Mistakes that a few small whole numbers on a few ranks do not show: each is found in every collective."""

import re

import pytest
import torch

from minipar.simple import collectives
from minipar.spec import SPECIFICATIONS
from minipar.spec.collectives import varied_calls
from minipar.spec.varied import BFLOAT16, FLOAT32, PLAIN

COLLECTIVES = ["reduce_scatter", "all_gather", "all_reduce", "broadcast", "all_to_all"]


def through_float32(right, comm, x, *args):
    return right(comm, x.float().to(x.dtype) if x.dtype == torch.float64 else x, *args)


def through_float64(right, comm, x, *args):
    return right(comm, x.double(), *args).to(x.dtype)


def zero_from_1000_elements_on(right, comm, x, *args):
    y = right(comm, x, *args)
    return y if x.numel() < 1000 else torch.zeros_like(y)


def wrong_from_five_ranks_on(right, comm, x, *args):
    y = right(comm, x, *args)
    return y if comm.size < 5 else y + 1


def wrong_in_bfloat16(right, comm, x, *args):
    y = right(comm, x, *args)
    return y if x.dtype != torch.bfloat16 else y + 1


def ignores_strides(right, comm, x, *args):
    return right(comm, x if x.is_contiguous() else x.as_strided(x.shape, x.contiguous().stride()), *args)


def nan_is_zero(right, comm, x, *args):
    return right(comm, x.nan_to_num() if x.is_floating_point() else x, *args)


MISTAKES = {  # and how the call in which it shows is described
    through_float32: r"float64",
    through_float64: r"int64, huge",
    zero_from_1000_elements_on: r"is zero",
    wrong_from_five_ranks_on: r"on (every one of )?5 ranks",
    wrong_in_bfloat16: r"bfloat16",
    ignores_strides: r"not contiguous",
    nan_is_zero: r"not finite",
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_that_depends_on_the_tensor_is_found(name, mistake):
    right = getattr(collectives, name)
    report = SPECIFICATIONS[name].check(lambda *args: mistake(right, *args))
    assert report.first_wrong is not None, f"{mistake.__name__} was called right"
    assert report.first_wrong.stage == "varied", str(report)
    assert re.search(MISTAKES[mistake], report.first_wrong.words), str(report)


def test_one_rank_has_nan_and_another_infinity():
    (call,) = [call for call in varied_calls("all_reduce", 3) if call.values == "not finite"]
    first, _, last = call.inputs(3)
    assert first.isnan().any()
    assert last.isinf().any()


@pytest.mark.parametrize(
    ("kind", "allowed"), [(PLAIN, 1e-10), (FLOAT32, 1e-4), (BFLOAT16, 0.1)], ids=["64", "32", "16 bits"]
)
def test_rounding_is_allowed_for_the_largest_entry_and_no_more(kind, allowed):
    x = torch.tensor([1.0, 4.0], dtype=torch.float64)
    for times, right in ((0.7, True), (1.5, False)):
        off = x + torch.tensor([times * allowed * 4.0, 0.0], dtype=torch.float64)
        assert (kind.mismatch("x", off.to(kind.dtype), x) is None) == right


@pytest.mark.thorough
@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_is_right_is_called_right(name):
    report = SPECIFICATIONS[name].check(getattr(collectives, name))
    assert report.ok, str(report)
