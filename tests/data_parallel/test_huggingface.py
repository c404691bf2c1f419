"""Hugging Face's models train under DDP, ZeRO, FSDP and tensor parallelism as in one process, or are refused by name."""

import pytest

import minipar
from minipar.tensor_parallel import tensor_parallel
from tests.data_parallel.hugging_face import ARCHITECTURES, OPTIMIZERS, batch, build, train
from tests.strategies import assert_equal_to

WRAPPERS = ("ddp", "zero", "fsdp", "tp")


def differences(world, name, lose=None, cases=None):
    """Train under each wrapper and with each optimizer; return (wrapper, optimizer, what differs) for each that does."""
    architecture, found = ARCHITECTURES[name], []
    for plan, said in architecture.refused:
        with pytest.raises(ValueError, match=said):
            tensor_parallel(build(name), world, plan=plan)(input_ids=batch(0))
    for optimizer in OPTIMIZERS:
        one = train(name, optimizer, None, None)
        for wrapper in WRAPPERS:
            if wrapper == "tp" and architecture.plan is None:
                continue
            try:
                _require_equal(train(name, optimizer, wrapper, world, lose), one)
            except (AssertionError, ValueError) as difference:
                found.append((wrapper, optimizer, str(difference)))
    return found


def _require_equal(trained, one):
    for step, (loss, want) in enumerate(zip(trained.losses, one.losses)):
        assert_equal_to(loss, want, what=f"loss {step}")
    for got, want in ((trained.gradients, one.gradients), (trained.parameters, one.parameters)):
        assert got.keys() == want.keys()
        for name in want:
            assert_equal_to(got[name].reshape(want[name].shape), want[name], what=name)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hugging_faces_models_train_as_in_one_process(name):
    assert minipar.run(differences, name, world_size=2) == [[], []]


@pytest.mark.parametrize("name", ["llama"])
def test_a_gradient_lost_on_one_rank_is_seen_under_every_wrapper(name):
    for found in minipar.run(differences, name, "model.layers.0.input_layernorm.weight", world_size=2):
        assert {(wrapper, optimizer) for wrapper, optimizer, _ in found} == {
            (wrapper, optimizer) for wrapper in WRAPPERS for optimizer in OPTIMIZERS
        }
