"""What the tests of tensor parallelism run on every rank, and the one process they compare it with."""

import torch

from minipar.mesh import placement_of
from minipar.tensor_parallel import tensor_parallel
from tests.strategies import assert_equal_to
from tests.tensor_parallel.strategies import Case


def cut(case: Case, world, **stage):
    return tensor_parallel(
        case.model(**stage), world, case.sequence_parallel, chunked=case.chunked, algorithm=case.algorithm
    )


def assert_gradients_equal(model, oracle, but=()) -> None:
    whole = dict(oracle.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter in but:
            continue
        want = placement_of(parameter).slice_of(whole[placement_of(parameter).name].grad)
        assert_equal_to(parameter.grad, want, what=name)


def compare_outputs(world, case: Case) -> None:
    model, oracle = cut(case, world), case.model()
    tokens, targets = case.tokens()
    positions = torch.arange(case.length) + (0 if case.config.num_experts else 3)  # experts see whole samples
    sample_ids = torch.arange(case.batch) * 5 + 1
    arguments = dict(positions=positions, sample_ids=sample_ids, step=7)
    assert_equal_to(model(tokens, **arguments), oracle(tokens, **arguments), what="logits")
    loss, want = (m.loss(tokens, targets, count=11, **arguments) for m in (model, oracle))
    assert_equal_to(loss, want, what="loss")
    loss.backward()
    want.backward()
    assert_gradients_equal(model, oracle)
