"""A drawn model of a user's trains under every wrapper as in one process, or is refused by the name of what cannot be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from tests.data_parallel.user_models import Case, cases, dtype_of, refusal_of, rounded_dtype_of, train
from tests.examples import examples
from tests.strategies import assert_equal_to

WRAPPERS = ("ddp", "zero1", "zero2", "fsdp", None)
ROUNDED = 3.0  # times the error of one process in the same dtype, and a rounding unit
LOST = "h.0.norm.weight"


def outcomes(world, cases, lose):
    return [outcome(world, case, lose) for case in cases]


def outcome(world, case, lose):
    """What `train` returns, or the refusal."""
    try:
        return train(case, world, dtype_of(case), lose)
    except (ValueError, RuntimeError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"


def check(*cases, lose=None):
    """Raise AssertionError unless the ranks' numbers are those of one process, or refused as they should be."""
    results = minipar.run(outcomes, cases, lose, world_size=cases[0].dp * cases[0].tp)
    for case, of_ranks in zip(cases, zip(*results)):
        _require_right(case, of_ranks)


def _require_right(case, results):
    if (named := refusal_of(case)) is not None:
        for said in results:
            assert isinstance(said, str), f"was not refused: {case}"
            assert named in said
        return
    exact = train(case, None)
    rounded = train(case, None, rounded_dtype_of(case)) if case.is_rounded else exact
    for result in results:
        assert not isinstance(result, str), result
        _require_near(result.gradients, exact.gradients, rounded.gradients, case)
        losses = [dict(enumerate(of.losses)) for of in (result, exact, rounded)]
        _require_near(*losses, case)
        if not case.is_rounded:
            _require_near(result.parameters, exact.parameters, exact.parameters, case)


def _require_near(got, exact, rounded, case):
    """Compare by name; in half precision, let an error be some times that of one process and of a rounding unit.

    Where the exact value is zero, there is only rounding in it, of the size of what cancelled: of the largest value.
    """
    assert got.keys() == exact.keys()
    unit, scale = torch.finfo(torch.bfloat16).eps, max(want.abs().max().item() for want in exact.values())
    for name, want in exact.items():
        if not case.is_rounded:
            assert_equal_to(got[name], want, what=str(name))
            continue
        error, largest = ((got[name].double() - want).abs().max(), want.abs().max())
        unit_here = unit * (largest if largest > 1e-14 else scale)
        limit = ROUNDED * ((rounded[name].double() - want).abs().max() + unit_here)
        assert error <= limit, f"{name}: {error:.1e} > {limit:.1e} (max|b| = {largest:.1e})"


@pytest.mark.parametrize("wrapper", WRAPPERS)
@examples(25)
@given(data=st.data())
def test_a_users_model_trains_as_in_one_process(wrapper, data):
    check(data.draw(cases(wrapper)))


FROZEN = [
    ("emb.*", "norm.*", "head.*"),  # the root, as with LoRA in the blocks
    ("emb.*", "h.*", "norm.*"),
    ("h.1.*", "norm.*"),
    ("h.0.*", "h.2.norm.*"),
    ("emb.*", "h.0.*", "h.1.norm.*", "head.*"),
]
OPTIONS = [(), ("reshard_after_forward", False), ("shard_rest", False), ("prefetch", False)]


@pytest.mark.parametrize("frozen", FROZEN)
def test_a_model_with_frozen_parts_trains_as_in_one_process(frozen):
    case = Case(layers=("mlp",) * 3, frozen=frozen, wrapper="fsdp")
    check(
        *(
            case._replace(recomputed=recomputed, options=(("units", "blocks"), *filter(None, [option])))
            for recomputed in ("none", "all")
            for option in OPTIONS
        )
    )


FAULTY = {
    "ddp": Case(),
    "zero1": Case(wrapper="zero1"),
    "zero2": Case(wrapper="zero2", backwards=2, sync="last"),
    "fsdp": Case(wrapper="fsdp", options=(("units", "blocks"),), optimizers=("AdamW", "SGD")),
    "tp": Case(wrapper=None, dp=1, tp=2),
    "bfloat16": Case(dtype="bfloat16"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_gradient_that_one_rank_loses_is_seen(name):
    check(FAULTY[name])
    with pytest.raises(AssertionError, match=LOST):
        check(FAULTY[name], lose=LOST)
