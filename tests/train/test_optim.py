import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.mesh import Placement, set_placement
from minipar.train.optim import ADAMW, BETAS, clip_grad_norm_, grad_norm, learning_rate, norm_shares
from tests.strategies import assert_equal_to, seeds


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    rates = [learning_rate(step, 100, 2.0, 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(100, 100, 2.0, 10) == pytest.approx(0.2)
    assert learning_rate(0, 5, 1.0, 0) == 1.0
    assert learning_rate(1, 4, 1.0, 0) == pytest.approx(0.1 + 0.45 * (1 + 0.5**0.5)), "cos(pi / 4)"
    assert learning_rate(5, 5, 1.0, 5) == 1.0, "a run that is all warmup"


def test_runs_average_gradients_as_gpt_3_did():
    assert BETAS == (0.9, 0.95), "arXiv:2005.14165, appendix B"


def test_matrices_decay_even_as_flat_shards_and_vectors_do_not():
    model = nn.Linear(3, 4)
    shard = nn.Parameter(torch.zeros(6))
    set_placement(shard, Placement.whole("w", (3, 4)).flatten_range(0, 6))
    frozen = [("frozen", nn.Parameter(torch.zeros(2, 2), requires_grad=False))]
    decays, rests = ADAMW.groups([*model.named_parameters(), ("shard", shard), *frozen], 0.1)
    assert [id(p) for p in decays["params"]] == [id(model.weight), id(shard)]
    assert [id(p) for p in rests["params"]] == [id(model.bias)]
    assert rests["weight_decay"] == 0


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.floats(0.01, 100), seeds)
def test_in_one_process_it_is_torchs(sizes, largest, seed):
    generator = torch.Generator().manual_seed(seed)
    ours = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in sizes]
    theirs = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in sizes]
    for a, b in zip(ours, theirs):
        a.grad = torch.randn(a.shape, generator=generator, dtype=torch.float64)
        b.grad = a.grad.clone()
    norm = clip_grad_norm_(ours, largest)
    assert_equal_to(norm.double(), nn.utils.clip_grad_norm_(theirs, largest).double(), what="norm")
    for a, b in zip(ours, theirs):
        assert_equal_to(a.grad, b.grad)


def parts_of_a_model(world, seed):
    """One matrix split over pairs of ranks, one vector on every rank, a bias on rank 3 alone, an unused one.

    Rank 2 also has a copy of the vector tied to it, cut elsewhere as ZeRO's buckets do: it counts nowhere.
    """
    generator = torch.Generator().manual_seed(seed)
    full = {
        n: torch.randn(s, generator=generator, dtype=torch.float64)
        for n, s in (("w", (4, 6)), ("v", (5,)), ("b", (3,)))
    }
    placements = {
        "w": Placement.whole("w", (4, 6)).shard(1, world.rank % 2, 2).replicate("dp"),
        "v": Placement.whole("v", (5,)).replicate("dp", "tp"),
    }
    if world.rank == 3:
        placements["b"] = Placement.whole("b", (3,))
    if world.rank == 2:
        placements["head"] = Placement.whole("head", (5,)).tie("v").flatten_range(1, 4)
        full["head"] = full["v"]
    params = []
    for name, placement in placements.items():
        param = nn.Parameter(torch.zeros(placement.local_shape, dtype=torch.float64))
        set_placement(param, placement)
        param.grad = placement.slice_of(full[name]).clone()
        params.append(param)
    unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    set_placement(unused, Placement.whole("unused", (2,)))
    shares = norm_shares(params, world)
    norm = clip_grad_norm_([*params, unused], 1e-3, world)
    want = torch.stack([x.square().sum() for name, x in full.items() if name != "head"]).sum().sqrt()
    tied = norm_shares(params, world, count_tied=True)
    return shares, tied, norm, want, params[1].grad, full["v"], unused.grad


def test_over_a_mesh_every_part_counts_once():
    for rank, (shares, tied, norm, want, grad, full, unused) in enumerate(
        minipar.run(parts_of_a_model, 5, world_size=4)
    ):
        assert shares == [1 / 2, 1 / 4, *{2: [0], 3: [1]}.get(rank, [])], rank
        assert tied == [1 / 2, 1 / 4, *{2: [1], 3: [1]}.get(rank, [])], rank
        assert_equal_to(norm.double(), want, what="norm")
        assert_equal_to(grad, full * (1e-3 / (want + 1e-6)))
        assert unused is None


def two_models(world, wrap):
    """The norm of the gradients of two models whose parameters have the same names and shapes, and what it is."""
    models = [wrap(nn.Linear(3, 2, bias=False), world) for _ in range(2)]
    for factor, model in zip((2.0, 5.0), models):
        (factor * model(torch.ones(1, 3))).sum().backward()
    params = [p for model in models for p in model.parameters()]
    return grad_norm(params, world).item(), (6 * 2.0**2 + 6 * 5.0**2) ** 0.5


@pytest.mark.parametrize("wrap", [minipar.DDP, minipar.FSDP])
def test_two_models_of_the_same_names_are_not_taken_for_replicas(wrap):
    for norm, want in minipar.run(two_models, wrap, world_size=2):
        assert norm == pytest.approx(want)


def norms_without_the_ranks(world):
    """What clipping without `comm` says of FSDP's shards, ZeroOptimizer's and tensor-parallel ones."""
    fsdp = minipar.FSDP(nn.Linear(8, 4), world)
    fsdp(torch.ones(1, 8)).sum().backward()
    linear = nn.Linear(8, 4)
    zero = minipar.ZeroOptimizer(linear.parameters(), torch.optim.SGD, world, lr=0.1)
    linear(torch.ones(1, 8)).sum().backward()
    column = nn.Parameter(torch.zeros(4, 4))
    set_placement(column, Placement.whole("column", (8, 4)).shard(0, world.rank, 2))
    column.grad = torch.ones(4, 4)
    said = []
    for params in (fsdp.parameters(), zero.shards, [column]):
        params = list(params)
        before = [p.grad.clone() for p in params if p.grad is not None]
        for norm in (lambda: clip_grad_norm_(params, 0.1), lambda: grad_norm(params)):  # noqa: B023
            with pytest.raises(ValueError) as refusal:
                norm()
            said.append(str(refusal.value))
        assert all(torch.equal(p.grad, g) for p, g in zip((p for p in params if p.grad is not None), before))
    return said


def test_a_norm_of_parts_without_the_other_ranks_is_refused():
    for said in minipar.run(norms_without_the_ranks, world_size=2):
        assert len(said) == 6
        for sentence in said:
            assert sentence.startswith("comm=None says that this process holds all of the model, but of ")
            assert "clip_grad_norm_(params, max_norm, comm)" in sentence
        assert "column [8, 4] it holds 16 elements" in said[4]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_norm_that_is_no_number_scales_nothing(value):
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, value])
    assert not torch.isfinite(clip_grad_norm_([param], 1.0))
    assert param.grad[0] == 1.0


def test_a_single_tensor_is_clipped_as_torch_clips_it():
    ours, theirs = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    ours.grad, theirs.grad = torch.full((4,), 10.0), torch.full((4,), 10.0)
    assert clip_grad_norm_(ours, 1.0) == nn.utils.clip_grad_norm_(theirs, 1.0) == 20.0
    assert torch.allclose(ours.grad, theirs.grad)


def norms_with_a_frozen_parameter(world):
    """The norm by shares of all parameters, one of which is frozen, and what is said of too few shares."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for name, param in zip("abc", params):
        set_placement(param, Placement(name, (1,), (0,), (1,)))
    params[1].requires_grad = False
    for param in params[::2]:
        param.grad = torch.full((1,), 2.0)
    shares = norm_shares(params, world)
    with pytest.raises(ValueError, match="shares has 2 numbers for 3 parameters"):
        grad_norm(params, world, shares[:2])
    return grad_norm(params, world, shares).item(), grad_norm(params, world).item()


def test_the_norm_by_shares_is_right_with_frozen_parameters():
    for by_shares, without in minipar.run(norms_with_a_frozen_parameter, world_size=2):
        assert by_shares == without == pytest.approx(8**0.5)


def norm_of_parameters_named_alike(world):
    params = [nn.Parameter(torch.ones(2)) for _ in range(2 - world.rank)]
    for param in params:
        set_placement(param, Placement.whole("weight", param.shape))
        param.grad = torch.ones(2)
    with pytest.raises(ValueError, match="2 parameters named weight, and rank 1 has 1.*model by model"):
        grad_norm(params, world)


def test_other_numbers_of_one_name_are_refused_on_all_ranks():
    minipar.run(norm_of_parameters_named_alike, world_size=2)
