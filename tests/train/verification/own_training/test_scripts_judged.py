"""Scripts by somebody who had not seen the judge: right ones are not accused, and each mistake is named."""

import pytest

import minipar
from minipar.support.errors import RankError
from tests.train.verification.scripts import RIGHT, WRONG


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_not_accused(name):
    setup, mesh = RIGHT[name]
    result = minipar.verify_training(setup, **mesh)
    assert result.equal, str(result)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_is_named(name):
    wrong = WRONG[name]
    if wrong.raises:
        with pytest.raises(RankError, match=wrong.raises):
            minipar.verify_training(wrong.setup, **wrong.sizes, steps=4)
        return
    try:
        result = minipar.verify_training(wrong.setup, **wrong.sizes, steps=4)
    except RankError as error:  # ranks that no longer go together
        said = str(error)
    else:
        assert not result.equal
        said = str(result)
    assert any(word in said for word in wrong.names), said
