"""DDP and FSDP around what people write: buffers, thawed layers, hidden outputs, old wrappers: right, or refused."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP
from minipar.data_parallel.flat_parameters import State
from minipar.extras.optimizers import Lamb
from minipar.model.overrides import GradientSync
from tests.strategies import assert_equal_to


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def samples(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def loss_of(model, rank, step=0):
    return model(samples(rank, step)).square().mean()


def in_one_process(model, size):
    (sum(loss_of(model, rank) for rank in range(size)) / size).backward()
    return {name: p.grad for name, p in model.named_parameters()}


WRAPPERS = {"DDP": DDP, "FSDP": FSDP}


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


def test_a_gradient_that_was_reduced_is_not_reduced_again_where_nothing_was_added():
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
    """Rank 0's own gradient is reduced again with what it adds, as the docstring says; the others keep theirs besides."""
    results = minipar.run(unused_later, world_size=2)
    first = [samples(rank).sum(0) for rank in range(2)]
    added, reduced = samples(0, 1).sum(0), first[0] + first[1]
    for rank, (_, on_rank_0) in enumerate(results):
        want = reduced + added + (reduced if rank else 0)
        assert_equal_to(on_rank_0["b.weight"], want.expand(3, 6), what=f"rank {rank}")


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


# Buffers -------------------------------------------------------------------------------------------------------------


def running_means(world, wrapper, broadcast_buffers):
    norm = nn.BatchNorm1d(6).double()
    wrapped = WRAPPERS[wrapper](norm, world, broadcast_buffers=broadcast_buffers)
    world.traffic.reset()
    for step in range(3):
        loss_of(wrapped, world.rank, step).backward()
    sent = world.traffic.by_kind.get("broadcast", 0)
    world.traffic.reset()
    with wrapped.no_sync():
        wrapped(samples(world.rank, 3))
    with torch.no_grad():
        wrapped(samples(world.rank, 4))
    assert "broadcast" not in world.traffic.by_kind
    return norm.running_mean, norm.num_batches_tracked, sent


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_running_means_are_rank_0s_before_each_forward(wrapper, broadcast_buffers):
    results = minipar.run(running_means, wrapper, broadcast_buffers, world_size=3)
    for rank, (mean, count, _) in enumerate(results):
        norm = nn.BatchNorm1d(6).double()
        for step in range(2):
            norm(samples(0 if broadcast_buffers else rank, step))
        for step in range(2, 5):  # nothing is broadcast under no_sync, nor without gradients
            norm(samples(rank, step))
        assert_equal_to(mean, norm.running_mean, what=f"rank {rank}")
        assert count == 5
    num_bytes = 8 * (6 + 6 + 1)  # mean, variance, number of batches
    assert sum(sent for *_, sent in results) == broadcast_buffers * 3 * (3 - 1) * num_bytes


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("scale", torch.full((6,), 2.0, dtype=torch.float64))

    def forward(self, x):
        return x * (self.scale * self.weight)  # saves the buffer for the backward


def two_forwards(world, wrapper):
    wrapped = WRAPPERS[wrapper](Scaled(), world)
    (wrapped(samples(world.rank)) + wrapped(samples(world.rank, 1))).sum().backward()
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    return wrapped.full_state_dict() if wrapper == "FSDP" else wrapped.module.state_dict()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_buffer_that_does_not_change_may_be_saved_for_a_backward(wrapper):
    of_ranks = [(samples(rank) + samples(rank, 1)).sum(0) * 2.0 for rank in range(2)]
    for state in minipar.run(two_forwards, wrapper, world_size=2):
        assert_equal_to(state["weight"], 1.0 - sum(of_ranks) / 2)


# Outputs --------------------------------------------------------------------------------------------------------------


@dataclass
class Out:
    y: torch.Tensor


@dataclass(slots=True)
class Slots:
    y: torch.Tensor


class Object:
    def __init__(self, y):
        self.inside = {"out": [Out(y)]}

    @property
    def y(self):
        return self.inside["out"][0].y


class Hides(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = network(), how
        self.scale = nn.Parameter(
            torch.ones(6, dtype=torch.float64)
        )  # needed in the backward of the first operation

    def forward(self, x):
        return self.how(self.inner((x * x.new_ones(6).requires_grad_()) * self.scale))


class Outer(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.hides = Hides(how)

    def forward(self, x):
        return self.hides(x).y * 2


def hidden_outputs(world, wrapper):
    grads = []
    for how in (Out, Slots, Object):
        for units in (None, Hides, (Hides, nn.Linear)) if wrapper == "FSDP" else (None,):
            options = {"units": units} if wrapper == "FSDP" else {}
            wrapped = WRAPPERS[wrapper](Outer(how), world, **options)
            for _ in range(2):
                wrapped.zero_grad()
                loss_of(wrapped, world.rank).backward()
            with torch.no_grad():
                optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
                optimizer.step()
            full = wrapped.full_state_dict() if wrapper == "FSDP" else wrapped.module.state_dict()
            grads.append((how, units, full))
    return grads


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_outputs_may_be_in_dataclasses_and_objects(wrapper):
    model = Outer(Out)
    grads = in_one_process(model, 2)
    for results in minipar.run(hidden_outputs, wrapper, world_size=2):
        for how, units, state in results:
            for name, p in model.named_parameters():
                assert_equal_to(state[name], p.detach() - grads[name], what=f"{how}, {units}: {name}")


class KeepsItsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        self.loss = self.inner(x).square().mean()


def loss_in_an_attribute(world):
    fsdp = FSDP(KeepsItsLoss(), world)
    for _ in range(2):
        fsdp(samples(world.rank))
        with pytest.raises(
            RuntimeError, match=r"the backward reached inner\..*not through the output of its unit, 'root'"
        ):
            fsdp.module.loss.backward()
    ddp = DDP(KeepsItsLoss(), world)
    ddp(samples(world.rank))
    ddp.module.loss.backward()
    return {name: p.grad for name, p in ddp.module.inner.named_parameters()}


def test_a_loss_kept_in_an_attribute_is_refused_by_fsdp_and_trained_by_ddp():
    for grads in minipar.run(loss_in_an_attribute, world_size=2):
        for name, want in in_one_process(network(), 2).items():
            assert_equal_to(grads[name], want, what=name)


def changed_in_place(world, wrapper):
    model = network()
    wrapped = WRAPPERS[wrapper](model, world)
    logits = wrapped(samples(world.rank))
    logits /= 2
    logits.masked_fill_(logits > 0.1, 0)
    logits.square().mean().backward()
    if wrapper == "FSDP":
        torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
        return {
            name: p - x
            for (name, p), x in zip(network().named_parameters(), wrapped.full_state_dict().values())
        }
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_outputs_may_be_changed_in_place(wrapper):
    model = network()
    for rank in range(2):
        logits = model(samples(rank)) / 2
        (logits.masked_fill(logits > 0.1, 0).square().mean() / 2).backward()
    for grads in minipar.run(changed_in_place, wrapper, world_size=2):
        for name, p in model.named_parameters():
            assert_equal_to(grads[name], p.grad, what=name)


# Refused in words ------------------------------------------------------------------------------------------------------


def refusals(world):
    model = network()
    ddp = DDP(model, world)
    again = DDP(model, world)
    loss_of(again, world.rank).backward()  # reduced once
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    for use in (lambda: loss_of(ddp, world.rank), ddp.synchronize):
        with pytest.raises(RuntimeError, match="this DDP no longer reduces gradients: a later DDP"):
            use()
    with pytest.raises(RuntimeError, match="a later DDP was made"):
        loss_of(DDP(DDP(network(), world), world), world.rank)
    fsdp = FSDP(model, world, nn.Linear)
    with pytest.raises(RuntimeError, match="a later FSDP was made"):
        loss_of(again, world.rank)
    for wrapper, by in ((FSDP, "a second FSDP"), (DDP, "DDP")):
        with pytest.raises(ValueError, match=f"0.weight is a shard made by FSDP, and {by} needs whole"):
            wrapper(model, world)
    for copied, what in ((ddp, "DDP"), (fsdp, "FSDP"), (fsdp.module, "FSDP")):
        for copying in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"{what} cannot be copied or pickled"):
                copying(copied)
    assert isinstance(ddp, GradientSync)
    assert isinstance(fsdp, GradientSync)
    assert not isinstance(model, GradientSync)
    return grads


def test_old_wrappers_second_wrappers_and_copies_are_refused():
    want = in_one_process(network(), 2)
    for grads in minipar.run(refusals, world_size=2):
        for name in want:
            assert_equal_to(grads[name], want[name], what=name)


def refused_layers(world):
    for old, name in ((nn.utils.weight_norm, "weight_norm"), (nn.utils.spectral_norm, "spectral_norm")):
        model = nn.Sequential(old(nn.Linear(6, 3)))
        with pytest.raises(
            ValueError, match=rf"torch\.nn\.utils\.{name} of unit '0' computes weight before.*parametri"
        ):
            FSDP(model, world, nn.Linear)
    for wrapper in WRAPPERS.values():
        sparse = wrapper(nn.Embedding(5, 2, sparse=True), world)
        with pytest.raises(
            RuntimeError, match=r"gradient of weight is sparse; use nn\.Embedding\(\.\.\., sparse=False\)"
        ):
            sparse(torch.tensor([1])).sum().backward()


def test_layers_that_fsdp_cannot_shard_and_sparse_gradients_are_refused():
    minipar.run(refused_layers, world_size=2)


def clipped(world):
    fsdp = FSDP(network(), world, nn.Linear)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=1.0)
    loss_of(fsdp, world.rank).backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for refused in (
        lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 0.01),
        lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 0.01, foreach=True),
        lambda: nn.utils.get_total_norm([p.grad for p in fsdp.parameters()]),
        lambda: next(fsdp.parameters()).grad.norm(),
        lambda: scaler.step(optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"minipar\.clip_grad_norm_\(shards, max_norm, comm\)"):
            refused()
    norm = minipar.clip_grad_norm_(fsdp.parameters(), 0.01, world)
    optimizer.step()
    return norm, fsdp.full_state_dict()


def test_torchs_clipping_of_shards_is_refused_and_minipars_is_that_of_one_process():
    model = network()
    in_one_process(model, 2)
    want = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for norm, state in minipar.run(clipped, world_size=2):
        assert_equal_to(norm, want)
        for name, p in model.named_parameters():
            assert_equal_to(state[name], p.detach(), what=name)


class Signs(torch.optim.SGD):
    """A stranger's class, of which nothing is known."""


def stepped_by(world):
    """What the first step says of each optimizer over FSDP's shards, and of those that may step."""
    said = {}
    for cls in (torch.optim.Adafactor, torch.optim.LBFGS, Signs):
        fsdp = FSDP(network(), world, nn.Linear)
        optimizer = cls(fsdp.parameters(), lr=0.1)
        before = [p.detach().clone() for p in fsdp.parameters()]
        with pytest.raises(ValueError) as refusal:
            optimizer.step(lambda: 0.0)
        said[cls.__name__] = str(refusal.value)
        assert all(torch.equal(p, b) for p, b in zip(fsdp.parameters(), before))
    trusted = FSDP(network(), world, nn.Linear, per_element=True)
    loss_of(trusted, world.rank).backward()
    Signs(trusted.parameters(), lr=0.1).step()
    whole = network()
    loss_of(whole, world.rank).backward()
    torch.optim.Adafactor(whole.parameters()).step()  # not FSDP's
    return said


def test_an_optimizer_not_known_to_be_per_element_is_refused_on_fsdps_shards():
    for said in minipar.run(stepped_by, world_size=2):
        for name, sentence in said.items():
            assert sentence.startswith(f"{name} is not known to update each element from that element alone")
            assert "per_element=True" in sentence


def stepped_by_lamb(world):
    fsdp = FSDP(network(), world, nn.Linear)
    loss_of(fsdp, world.rank).backward()
    with pytest.raises(ValueError, match=r"of .* it holds \d+ elements; .*Lamb\(params, comm=comm\)"):
        Lamb(fsdp.parameters()).step()
    Lamb(fsdp.parameters(), comm=world).step()


def test_lamb_over_shards_asks_for_the_ranks_that_hold_the_others():
    minipar.run(stepped_by_lamb, world_size=2)


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
def test_a_forward_uses_the_parameters_as_they_are_though_older_ones_are_unsharded(how):
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
    gather, seen = world.all_gather, []
    world.all_gather = lambda *args, out, **options: Awaited(gather(*args, out=out, **options), out, seen)
    flat.unshard()
    flat.reshard()
    del world.all_gather
    assert flat.state is State.SHARDED
    return seen, flat.full.nbytes, flat.full.untyped_storage().nbytes()


def test_resharding_waits_for_the_all_gather_before_it_frees_the_memory():
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


def cast_after_wrapping(world):
    said = []
    for make in (
        lambda m: DDP(m, world),
        lambda m: minipar.ZeroOptimizer(m.parameters(), torch.optim.Adam, world),
    ):
        model = network()
        wrapper = make(model)
        model.float()
        with pytest.raises(RuntimeError) as caught:
            (wrapper if isinstance(wrapper, DDP) else model)(samples(world.rank).float()).sum().backward()
        said.append(str(caught.value))
    return said


def test_a_model_that_was_cast_after_it_was_wrapped_is_refused():
    for said in minipar.run(cast_after_wrapping, world_size=2)[0]:
        assert (
            "was cast from torch.float64 to torch.float32 after it was wrapped; cast the model first" in said
        )


def assigned(world):
    model = FSDP(network(), world)
    with pytest.raises(ValueError, match="assign=True would replace FSDP's shards"):
        model.load_state_dict(model.state_dict(), assign=True)
    other = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    return all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def test_fsdps_shards_are_loaded_in_place_only():
    assert minipar.run(assigned, world_size=2) == [True, True]
