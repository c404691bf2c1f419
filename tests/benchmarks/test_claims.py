"""The page of claims is that of the code, its verdicts are computed, and the tests that it names exist."""

import ast
from pathlib import Path

import pytest

from benchmarks.guide.claims import KINDS, claims, page

ROOT = Path(__file__).parents[2]
CLAIMS = {claim.said: claim for claim in claims()}


def test_the_page_is_that_of_the_claims():
    written = (ROOT / "docs" / "generated" / "claims.md").read_text()
    assert written == page(), "run: python -m benchmarks.guide.claims docs/generated/claims.md"
    assert written.count("| **right**:") + written.count("| **wrong**:") == len(claims()) >= 35


@pytest.mark.parametrize("said", CLAIMS)
def test_a_claim_names_its_kind_of_source_and_a_test_that_exists(said):
    claim = CLAIMS[said]
    assert claim.kind in KINDS
    file, _, name = claim.test.partition("::")
    functions = [node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")]
    assert name in functions


def test_claims_stand_once():
    assert len(CLAIMS) == len(claims())


TWO_SIDED = [said for said, claim in CLAIMS.items() if "==" in claim.holds or "abs" in claim.holds]


@pytest.mark.parametrize("said", [said for said in TWO_SIDED if CLAIMS[said].is_right()])
def test_a_claim_that_is_right_would_not_be_with_another_value(said):
    claim = CLAIMS[said]
    for factor in (0.5, 1.5):
        assert not claim._replace(value=f"{factor} * ({claim.value})").is_right()


def test_a_wrong_claim_becomes_right_with_the_computed_value():
    for claim in (CLAIMS[said] for said in TWO_SIDED):
        assert claim._replace(holds=f"abs(x - {claim.computed()}) < 1e-9").is_right()
