"""Experts spread over ranks are the model of one process: logits, loss, every gradient, several steps."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minipar
from minipar.expert import expert_parallel, gradient_comm
from minipar.mesh import Mesh
from minipar.model import IGNORED, set_num_groups, take_metrics, update_balance_bias
from minipar.placement import place_whole, placement_of
from tests.expert.strategies import Case, cases
from tests.strategies import assert_equal_to


def spread(case: Case, mesh: Mesh):
    model = expert_parallel(case.model(), mesh.comm("ep"), algorithm=case.algorithm)
    place_whole(model)
    set_num_groups(model, case.config.num_groups(sum(case.samples), case.length))
    return model


def own_loss(case: Case, mesh: Mesh, model, step: int = 0):
    """This rank's part of the loss."""
    tokens, targets = case.tokens(step)
    rows = case.rows(mesh.coordinates.dp)
    count = int((targets != IGNORED).sum())
    return model.loss(tokens[rows], targets[rows], sample_ids=rows, step=step, count=count)


def sum_gradients(mesh: Mesh, model) -> None:
    comm_of = gradient_comm(mesh)
    for parameter in model.parameters():
        comm_of(parameter).all_reduce_(parameter.grad)


def compare(world, case: Case, steps: int, wrong=None) -> None:
    mesh = Mesh(world, dp=case.dp, ep=case.ep)
    model, oracle = spread(case, mesh), case.model()
    for step in range(steps):
        tokens, targets = case.tokens(step)
        rows = case.rows(mesh.coordinates.dp)
        logits = model(tokens[rows], sample_ids=rows, step=step)
        assert_equal_to(logits, oracle(tokens, step=step)[rows], what="logits")
        take_metrics(model)
        take_metrics(oracle)
        loss, want = own_loss(case, mesh, model, step), oracle.loss(tokens, targets, step=step)
        assert_equal_to(world.all_reduce(loss.detach()), want.detach(), floor=1e-13, what="loss")
        loss.backward()
        want.backward()
        sum_gradients(mesh, model)
        compare_gradients(model, oracle)
        compare_metrics(mesh, take_metrics(model), take_metrics(oracle))
        for m, comm in ((model, mesh.comm("dp")), (oracle, None)):
            update_balance_bias(m, 0.05, comm)
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
    compare_values(model, oracle)


def compare_gradients(model, oracle) -> None:
    whole = dict(oracle.named_parameters())
    for name, parameter in model.named_parameters():
        want = placement_of(parameter).slice_of(whole[placement_of(parameter).name].grad)
        assert_equal_to(parameter.grad, want, what=f"gradient of {name}")


def compare_metrics(mesh, found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        for field in ("balance_loss", "z_loss", "load", "kept_load", "unserved", "entropy_sum"):
            total = mesh.comm("dp").all_reduce(getattr(found[name], field))
            assert_equal_to(total, getattr(want, field), floor=1e-12, what=f"{name} {field}")


def compare_values(model, oracle) -> None:
    whole = oracle.state_dict()
    for name, parameter in model.named_parameters():
        want = placement_of(parameter).slice_of(whole[name])
        assert_equal_to(parameter.detach(), want, what=f"{name} after the last step")
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(oracle.named_buffers())[name])


@given(cases=st.lists(cases(), min_size=4, max_size=4), steps=st.integers(1, 3))
@settings(max_examples=12)
def test_experts_on_any_number_of_ranks_are_the_model_of_one_process(cases, steps):
    """In one run several models, as a run on many ranks costs more than such small ones."""

    def body(world):
        for case in cases:
            if world.rank < case.dp:
                sub = world.subgroup(range(case.dp), str(case))
                # after a step from a router of zeros, experts that nobody chose are equal but for rounding: no tie at all
                compare(sub, case, 1 if case.ties else steps)

    minipar.run(body, world_size=max(c.dp for c in cases), timeout_s=10)
