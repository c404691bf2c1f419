"""What the tests of expert parallelism run on every rank, and the one process they compare it with."""

from __future__ import annotations

import torch

import minipar
from minipar.expert import expert_parallel, gradient_comm
from minipar.mesh import Mesh, place_whole, placement_of
from minipar.model import IGNORE_INDEX, set_num_groups, take_metrics, update_balance_bias
from tests.expert.strategies import Case
from tests.strategies import assert_equal_to


def spread(case: Case, mesh: Mesh):
    model = expert_parallel(
        case.model(), mesh.comm("ep"), algorithm=case.algorithm, dispatch=case.dispatch, **case.options
    )
    place_whole(model)
    set_num_groups(model, case.config.num_groups(sum(case.samples), case.length))
    return model


def own_loss(case: Case, mesh: Mesh, model, step: int = 0):
    """This rank's part of the loss."""
    tokens, targets = case.tokens(step)
    rows = case.rows(mesh.coordinates.dp)
    count = int((targets != IGNORE_INDEX).sum())
    return model.loss(tokens[rows], targets[rows], sample_ids=rows, step=step, count=count)


def sum_gradients(mesh: Mesh, model) -> None:
    """Over the ranks that `gradient_comm` says; all gradients of the same ranks in one message."""
    comm_of, together = gradient_comm(mesh), {}
    for parameter in model.parameters():
        together.setdefault(comm_of(parameter), []).append(parameter.grad)
    for comm, gradients in together.items():
        total = comm.all_reduce(torch.cat([g.flatten() for g in gradients]))
        for g, part in zip(gradients, total.split([g.numel() for g in gradients])):
            g.copy_(part.view_as(g))


def differences(world, case: Case, steps: int):
    """Train both; then (found, wanted, what) for all that should be equal. Compared afterwards, so that no rank is left
    waiting for one that found a difference."""
    mesh = Mesh(world, dp=case.dp, ep=case.ep)
    model, oracle = spread(case, mesh), case.model()
    pairs = []
    for step in range(steps):
        tokens, targets = case.tokens(step)
        rows = case.rows(mesh.coordinates.dp)
        logits = model(tokens[rows], sample_ids=rows, step=step)
        pairs.append((logits, oracle(tokens, step=step)[rows], "logits"))
        take_metrics(model)
        take_metrics(oracle)
        loss, want = own_loss(case, mesh, model, step), oracle.loss(tokens, targets, step=step)
        pairs.append((world.all_reduce(loss.detach()), want.detach(), "loss"))
        loss.backward()
        want.backward()
        sum_gradients(mesh, model)
        pairs += of_parameters(
            model, {name: p.grad for name, p in oracle.named_parameters()}, "gradient", "grad"
        )
        pairs += of_metrics(mesh, take_metrics(model), take_metrics(oracle))
        for m, comm in ((model, mesh.comm("dp")), (oracle, None)):
            update_balance_bias(m, 0.05, comm)
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
    wanted = {name: p.data for name, p in oracle.named_parameters()}
    pairs += of_parameters(model, wanted, "value after the last step", "data")
    biases = dict(oracle.named_buffers())
    return pairs + [(found, biases[name], name) for name, found in model.named_buffers()]


def of_parameters(model, wanted, what: str, attribute: str):
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter)
        want = placement.slice_of(wanted[placement.name]).clone()
        yield getattr(parameter, attribute).clone(), want, f"{what} of {name}"


def of_metrics(mesh, found, wanted):
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        fields = ("balance_loss", "z_loss", "load", "kept_load", "unserved", "entropy_sum")
        ours, theirs = (
            torch.cat([getattr(metrics, f).double().reshape(-1) for f in fields])
            for metrics in (found[name], want)
        )
        yield mesh.comm("dp").all_reduce(ours), theirs, f"metrics of {name}"


def compare(world, case: Case, steps: int = 1) -> None:
    for found, wanted, what in differences(world, case, steps):
        assert_equal_to(found, wanted, floor=1e-13, what=what)


def check_together(cases: list[Case], steps: int) -> None:
    """Compare each case with one process, all in one run: a run on many ranks costs more than such small models."""

    def body(world):
        for case in cases:
            if world.rank < case.dp:
                compare(world.subgroup(range(case.dp), str(case)), case, steps)

    minipar.run(body, world_size=max(c.dp for c in cases))
