"""Evaluation mode ends with each submodule in the mode that it had."""

from torch import nn

from minipar.model.evaluating import evaluating


def test_every_submodule_gets_its_own_mode_back():
    model, other = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.Dropout()
    model[0].eval()  # frozen, while the rest trains
    other.eval()
    with evaluating(model, other):
        assert not any(m.training for m in (*model.modules(), other))
    assert [m.training for m in (model, *model, other)] == [True, False, True, False]
