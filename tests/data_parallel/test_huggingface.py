"""Hugging Face's models train under DDP, ZeRO, FSDP and tensor parallelism as in one process, or are refused by name."""

import pytest

import minipar
from minipar.data_parallel import FSDP
from minipar.tensor_parallel import full_state_dict, tensor_parallel
from tests.data_parallel.hugging_face import ARCHITECTURES, OPTIMIZERS, batch, build, layers_of, train
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


def saved(world, folder):
    """Save under FSDP and tensor parallelism: refused with what would work, which then is the model."""
    for wrapper, says in (("fsdp", "save_pretrained takes it as state_dict="), ("tp", "full_state_dict")):
        model = build("llama-tied")
        if wrapper == "fsdp":
            fsdp = FSDP(model, world, units=layers_of(model))
        else:
            tensor_parallel(model, world, plan="llama")
        with pytest.raises(RuntimeError, match=says):
            model.save_pretrained(f"{folder}/refused-{world.rank}")
        state = fsdp.full_state_dict() if wrapper == "fsdp" else full_state_dict(model, world)
        if world.rank > 0:
            continue  # transformers writes on the first rank alone
        own = f"{folder}/{wrapper}"
        model.save_pretrained(own, state_dict=state)
        loaded = type(model).from_pretrained(own, dtype="float64")
        for name, value in build("llama-tied").state_dict().items():
            assert_equal_to(loaded.state_dict()[name], value, what=name)


@pytest.mark.thorough
def test_save_pretrained_writes_the_whole_model_or_is_refused(tmp_path):
    minipar.run(saved, str(tmp_path), world_size=2)
