"""DDP and FSDP around parameters that change: thawed, added, replicas that differ, and those changed while unsharded."""

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.data_parallel.flat_parameters import State
from tests.data_parallel.wrapped import in_one_process, loss_of, network, samples
from tests.strategies import assert_equal_to

# Parameters that come later -----------------------------------------------------------------------------------------


def thawed_and_added(world):
    model = network()
    model[0].requires_grad_(False)
    ddp = DDP(model, world)
    model[0].requires_grad_(True)
    torch.manual_seed(world.rank)  # other values on each rank: rank 0's are what counts
    model.append(nn.Linear(3, 2).double())
    loss_of(ddp, world.rank).backward()
    return {name: p.grad for name, p in model.named_parameters()}, model[3].state_dict()


def test_parameters_thawed_or_added_after_wrapping_are_synchronised():
    for grads, added in minipar.run(thawed_and_added, world_size=3):
        model = network().append(nn.Linear(3, 2).double())
        model[3].load_state_dict(added)
        for name, want in in_one_process(model, 3).items():
            assert_equal_to(grads[name], want, what=name)


def thawed_on_rank_1(world, zero):
    model = network()
    model[0].requires_grad_(False)
    ddp = model if zero else DDP(model, world)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, world, lr=0.1) if zero else ddp
    model[0].requires_grad_(world.rank == 1)
    optimizer.zero_grad()
    loss_of(ddp, world.rank).backward()


@pytest.mark.parametrize("zero", [False, True])
def test_a_layer_thawed_on_one_rank_is_told_in_the_deadlock(zero):
    said = "rank 1 waits to send .* of the comparison of thawed or added parameters"
    with pytest.raises(minipar.RankError, match=said):
        minipar.run(thawed_on_rank_1, zero, world_size=2, timeout_s=60)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, x, heads: str):
        return sum(getattr(self, name)(x) for name in heads)


def unused_later(world):
    """Gradients after a backward through both heads, then one through a, zeroed before, and b: on no rank, or on rank 0."""
    seen = []
    for second in ("a", "ab" if world.rank == 0 else "a"):
        ddp = DDP(TwoHeads(), world, reduce="sum", bucket_mb=1.0)
        ddp(samples(world.rank), "ab").sum().backward()
        ddp.module.a.zero_grad()
        ddp(samples(world.rank, 1), second).sum().backward()
        seen.append({name: p.grad.clone() for name, p in ddp.module.named_parameters()})
    return seen


def test_an_unchanged_reduced_gradient_is_not_reduced_again():
    for on_none, on_rank_0 in minipar.run(unused_later, world_size=3):
        model = TwoHeads()
        for rank in range(3):
            model(samples(rank), "b").sum().backward()
            model(samples(rank, 1), "a").sum().backward()
        for name, p in model.named_parameters():
            assert_equal_to(on_none[name], p.grad, what=name)
        for name, p in model.a.named_parameters():
            assert_equal_to(on_rank_0[f"a.{name}"], p.grad, what=name)


def test_a_rank_that_adds_to_its_gradient_meets_ranks_that_do_not():
    """The gradients are reduced again on both ranks: were one to keep its own aside, the replicas would differ.

    "sum" then counts what was reduced once per rank, as it does where every rank adds; with "mean", it counts once.
    """
    results = minipar.run(unused_later, world_size=2)
    reduced, added = samples(0).sum(0) + samples(1).sum(0), samples(0, 1).sum(0)
    for rank, (_, on_rank_0) in enumerate(results):
        assert_equal_to(on_rank_0["b.weight"], (2 * reduced + added).expand(3, 6), what=f"rank {rank}")
    assert torch.equal(results[0][1]["b.weight"], results[1][1]["b.weight"])


def used_by_rank_0_again(world):
    ddp = DDP(TwoHeads(), world)
    ddp(samples(world.rank), "ab").sum().backward()
    ddp(samples(world.rank, 1), "ab" if world.rank == 0 else "a").sum().backward()
    return {name: p.grad for name, p in ddp.module.named_parameters()}


def test_adding_to_gradients_on_one_rank_matches_one_process():
    model = TwoHeads()
    for step, heads_of_rank_1 in enumerate(("ab", "a")):
        for rank, heads in enumerate(("ab", heads_of_rank_1)):
            (model(samples(rank, step), heads).sum() / 2).backward()
    for grads in minipar.run(used_by_rank_0_again, world_size=2):
        for name, p in model.named_parameters():
            assert_equal_to(grads[name], p.grad, what=name)


def backward_alone_in_no_sync(world):
    model = nn.Linear(1, 1, bias=False).double()
    ddp = DDP(model, world, reduce="sum")
    x = torch.full((1, 1), world.rank + 1.0, dtype=torch.float64)
    loss = (2 * ddp(x)).sum()
    with ddp.no_sync():
        loss.backward()
    inside = model.weight.grad.item()
    (2 * ddp(x)).sum().backward()
    return inside, model.weight.grad.item()


def test_no_sync_around_the_backward_alone_reduces_nothing():
    assert minipar.run(backward_alone_in_no_sync, world_size=2) == [(2.0, 12.0), (4.0, 12.0)]


# Replicas ------------------------------------------------------------------------------------------------------------


def replica(world):
    torch.manual_seed(world.rank)
    model = nn.Linear(6, 3).double()
    drawn = model.weight.detach().clone()
    ddp = DDP(model, world)
    start = model.weight.detach().clone()
    optimizer = torch.optim.Adam(ddp.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, world.rank, step).backward()
        optimizer.step()
    return drawn, start, model.weight.detach()


def test_replicas_that_differ_start_as_rank_0s_and_stay_equal():
    (drawn, _, trained), *others = minipar.run(replica, world_size=3)
    for own, start, end in others:
        assert not torch.equal(own, drawn)
        assert torch.equal(start, drawn)
        assert torch.equal(end, trained)
    assert not torch.equal(trained, drawn)


# Stale parameters ------------------------------------------------------------------------------------------------------


def changed_while_unsharded(world, how, reshard, in_no_sync):
    """The largest error of a forward after the parameters were changed, when an earlier forward left some unsharded."""
    fsdp = FSDP(network(), world, nn.Linear, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.5)
    loss_of(fsdp, world.rank).backward()
    with fsdp.no_sync() if in_no_sync else torch.enable_grad():
        fsdp(samples(world.rank))  # and no backward
        if how == "step":
            optimizer.step()
        elif how == "load":
            fsdp.load_full_state_dict({name: x + 1 for name, x in fsdp.full_state_dict().items()})
        else:
            with fsdp.summon_full_parameters():
                for p in fsdp.parameters():
                    p.data += 1
        out = fsdp(samples(world.rank))
    model = network()
    model.load_state_dict(fsdp.full_state_dict())
    return (out - model(samples(world.rank))).abs().max().item()


def all_changes(world, how):
    return [changed_while_unsharded(world, how, a, b) for a in (True, False) for b in (True, False)]


@pytest.mark.parametrize("how", ["step", "load", "summon"])
def test_a_forward_never_uses_stale_unsharded_parameters(how):
    for errors in minipar.run(all_changes, how, world_size=2):
        assert max(errors) < 1e-12


class Awaited:
    """A handle of an all-gather that notes how much memory there was to write to when it was waited for."""

    def __init__(self, handle, full, seen):
        self.handle, self.full, self.seen = handle, full, seen

    def wait(self):
        self.seen.append(self.full.untyped_storage().nbytes())
        return self.handle.wait()


def frees_a_buffer_being_filled(world):
    (flat,) = FSDP(nn.Linear(6, 3), world).flats
    all_gather, seen = world.all_gather, []
    world.all_gather = lambda *args, **options: Awaited(all_gather(*args, **options), flat.full, seen)
    flat.unshard()
    flat.reshard()
    del world.all_gather
    assert flat.state is State.SHARDED
    return seen, flat.full.nbytes, flat.full.untyped_storage().nbytes()


def test_resharding_waits_for_the_all_gather_before_freeing():
    for seen, num_bytes, left in minipar.run(frees_a_buffer_being_filled, world_size=2):
        assert seen == [num_bytes]
        assert left == 0


def fails_in_synchronize(world):
    fsdp = FSDP(network(), world, nn.Linear)
    with fsdp.no_sync():
        loss_of(fsdp, world.rank).backward()
        finish, fsdp.reducer.finish = fsdp.reducer.finish, lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            fsdp.synchronize()
        fsdp.reducer.finish = finish
        world.traffic.reset()
        loss_of(fsdp, world.rank).backward()
        assert "reduce_scatter" not in world.traffic.by_kind


def test_after_an_error_in_synchronize_no_sync_still_holds():
    minipar.run(fails_in_synchronize, world_size=2)


def steps_under_no_sync(world):
    fsdp = FSDP(network(), world, nn.Linear)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.5)
    for before in (0, 1):  # and once after a reduced gradient, which a step would take alone
        for _ in range(before):
            loss_of(fsdp, world.rank).backward()
            optimizer.step()
        with fsdp.no_sync():
            loss_of(fsdp, world.rank).backward()
        with pytest.raises(
            RuntimeError, match=r"under no_sync\(\) are not reduced.*synchronize\(\) of the FSDP"
        ):
            optimizer.step()
        fsdp.synchronize()
        optimizer.step()
        fsdp.zero_grad()
    with fsdp.no_sync():
        loss_of(fsdp, world.rank).backward()
    fsdp.zero_grad()
    optimizer.step()
    loss_of(fsdp, world.rank).backward()
    with fsdp.no_sync():  # a backward that gives no parameter a gradient leaves nothing out
        x = torch.randn(2, 6, requires_grad=True, dtype=torch.float64)
        torch.autograd.grad(fsdp(x).sum(), x)
    optimizer.step()


def test_a_step_that_would_leave_out_gradients_is_refused():
    minipar.run(steps_under_no_sync, world_size=2)
