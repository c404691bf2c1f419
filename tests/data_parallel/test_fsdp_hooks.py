"""What FSDP holds and sends, to the byte; and what it does when the model is not run as a plain training loop runs it."""

from itertools import product

import pytest
import torch
from torch import nn

import minipar
from minipar.config.model_config import ModelConfig
from minipar.data_parallel import FSDP
from minipar.model import Transformer
from minipar.model.block import Block
from minipar.model.deferrable_linear import WeightGradients, defer_weight_gradients
from minipar.model.init import initial_weight
from minipar.spec.memory import held_bytes, storages
from tests.data_parallel.memory import Peak
from tests.data_parallel.training import Case, Net, Part, batch
from tests.data_parallel.wrapped import in_one_process, loss_of, network
from tests.strategies import assert_equal_to

CASE = Case(width=6)


def padded(sizes, num_ranks: int) -> int:
    """Elements of a flat buffer: each parameter rounded up to 64, all of them to 64 a rank."""
    total = sum(-(-n // 64) * 64 for n in sizes)
    return -(-total // (64 * num_ranks)) * 64 * num_ranks


# Traffic ----------------------------------------------------------------------------------------------------------


def sent_in_a_step(world, recompute, reshard, prefetch):
    """Bytes by kind, and the elements of the root's and the parts' flat buffers."""
    net = Net(7, 0, recompute)
    root = [p for name, p in net.named_parameters() if not name.startswith("parts")]
    sizes = [[p.numel() for p in root if p.requires_grad], [p.numel() for p in root if not p.requires_grad]]
    sizes += [[p.numel() for p in part.parameters()] for part in net.parts]
    trained, frozen, *parts = (padded(s, world.size) for s in sizes)
    num_trained = sum(len(s) for i, s in enumerate(sizes) if i != 1)
    fsdp = FSDP(net, world, Part, True, reshard, prefetch=prefetch, algorithm="ring")
    sent = []
    for step in range(2):  # the first doesn't know the order of units yet, the second gathers ahead
        world.traffic.reset()
        fsdp(batch(CASE._replace(width=7), world.rank, step, 0), world.rank).backward()
        sent.append(dict(world.traffic.by_kind))
    return sent, trained, frozen, sum(parts), num_trained


def all_sent(world, options):
    return [sent_in_a_step(world, *each) for each in options]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_step_sends_parameters_thrice_less_kept_and_frozen(size):
    options = list(product(["no", "reentrant", "not reentrant"], [True, False], [True, False]))
    for results in minipar.run(all_sent, options, world_size=size):
        for (_, reshard, _), (steps, trained, frozen, parts, num_trained) in zip(options, results):
            gather_parameters = trained + frozen + (2 if reshard else 1) * parts
            flags = -(-num_trained // size) * size
            for sent in steps:
                assert sent.get("all_gather", 0) == 8 * (size - 1) * gather_parameters // size
                assert sent.get("reduce_scatter", 0) == 8 * (size - 1) * (trained + parts) // size
                assert sent.get("all_reduce", 0) == 2 * (size - 1) * flags // size


# Memory -----------------------------------------------------------------------------------------------------------


def layers(num: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num)))


def held_and_peak(world, compute_dtype, fsdp_cls=FSDP):
    before = storages()
    fsdp = fsdp_cls(layers(10, 64), world, nn.Linear, compute_dtype=compute_dtype, algorithm="ring")
    optimizer = torch.optim.AdamW(fsdp.parameters())
    x = torch.ones(1, 64)
    peak = 0
    for _ in range(3):
        optimizer.zero_grad()
        with Peak() as memory:
            fsdp(x).float().sum().backward()
        peak = max(peak, memory.peak)
        optimizer.step()
    return held_bytes(before) - x.nbytes, peak, sum(p.numel() for p in fsdp.parameters())


def all_held(world):
    # Twice: the first optimizer of a process makes torch import, and keep, a thing or two.
    held_and_peak(world, None)
    return {dtype: held_and_peak(world, dtype) for dtype in (None, torch.bfloat16)}


UNIT = 64 * 64 + 64


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7))]
)
def test_between_steps_ranks_share_16_bytes_per_parameter(size):
    total = 10 * padded([64 * 64, 64], size)
    for results in minipar.run(all_held, world_size=size):
        for dtype, (held, peak, own) in results.items():
            assert held == 8 * total // size + 8 * own + 4 * 20  # the optimizer's state has no padding
            compute = 2 if dtype else 4
            # Two units whole, two of full gradients, and one more that autograd has just made; activations.
            gather_parameters = 2 * compute * UNIT + (2 * 4 + compute) * UNIT
            assert peak <= held + gather_parameters + 12 * 64 * size * 4 + 64 * 4 * 60


class NeverReshards(FSDP):
    def _before_forward(self, unit, *call):
        for flat in unit.flats:
            flat.reshard = flat.use_sharded
        return super()._before_forward(unit, *call)


@pytest.mark.thorough
def test_units_that_are_never_resharded_are_seen_in_the_peak():
    results = minipar.run(
        lambda world: (held_and_peak(world, None), held_and_peak(world, None, NeverReshards)),
        world_size=4,
    )
    for (_, right, _), (_, wrong, _) in results:
        assert wrong > right + 5 * 4 * UNIT


def peaks_of_a_forward(world):
    """The peak without and with prefetch, once the order of units is known, and the bytes of a whole unit."""
    peaks = []
    for prefetch in (False, True):
        fsdp = FSDP(layers(10, 64), world, nn.Linear, prefetch=prefetch, algorithm="ring")
        for _ in range(2):
            with Peak() as memory:
                fsdp(torch.ones(1, 64))
        peaks.append(memory.peak)
    return *peaks, 4 * padded([64 * 64, 64], world.size)


def test_prefetch_costs_the_memory_of_one_more_unit():
    for one_by_one, prefetched, unit_bytes in minipar.run(peaks_of_a_forward, world_size=4):
        an_output = 64 * 4  # alive at one of the two peaks
        assert 0 <= unit_bytes - (prefetched - one_by_one) <= an_output


# Unusual calls --------------------------------------------------------------------------------------------------


def gradients_of(fsdp):
    with fsdp.summon_full_parameters():
        pass
    return {n: p.grad.clone() for n, p in fsdp.module.named_parameters() if p.grad is not None}


def one_step(fsdp, rank):
    fsdp.zero_grad()
    fsdp(batch(CASE, rank, 0, 0), rank).backward()
    return gradients_of(fsdp)


def fails_once(net):
    """Make the second part raise in its next forward."""
    forward = net.parts[1].inner.forward

    def broken(x):
        net.parts[1].inner.forward = forward
        raise ZeroDivisionError

    net.parts[1].inner.forward = broken


def disturbed(world, how, recompute):
    """The same step before and after a disturbance gives the same bits."""
    fsdp = FSDP(Net(6, 0, recompute), world, Part, algorithm="ring")
    want = one_step(fsdp, world.rank)
    x = batch(CASE, world.rank, 1, 0)
    if how == "no_grad":
        with torch.no_grad():
            losses = [fsdp(x, world.rank) for _ in range(2)]
        assert torch.equal(*losses)
    elif how == "forward alone":
        fsdp(x, world.rank)
    elif how == "exception in a forward":
        fails_once(fsdp.module)
        with pytest.raises(ZeroDivisionError):
            fsdp(x, world.rank)
    elif how == "exception in a backward":
        loss = fsdp(x, world.rank)
        handle = fsdp.module.parts[0].scale.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    got = one_step(fsdp, world.rank)
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), f"{how}, {recompute}: {name}"
    with torch.no_grad():
        fsdp(x, world.rank)
        for shard in fsdp.parameters():
            shard.mul_(2)
        loss = fsdp(x, world.rank)
        fsdp.reshard()
        assert torch.equal(loss, fsdp(x, world.rank)), f"{how}, {recompute}: a forward after new weights"


HOWS = ["no_grad", "forward alone", "exception in a forward", "exception in a backward"]


@pytest.mark.parametrize("recompute", ["no", "reentrant", "not reentrant"])
def test_a_step_after_a_disturbance_is_like_one_before(recompute):
    minipar.run(lambda world: [disturbed(world, how, recompute) for how in HOWS] and None, world_size=2)


def fails_in_a_backward(fsdp, rank, step):
    """Run a backward that raises when one unit's gradients are reduced and another's are on their way."""
    loss = loss_of(fsdp, rank, step)
    handle = fsdp.module[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()


def fails_while_it_accumulates(world, inside):
    """Accumulate, fail, and go on: refused until FSDP's zero_grad; return the gradients of the step after it."""
    fsdp = FSDP(network(), world, nn.Linear)
    with fsdp.no_sync():
        loss_of(fsdp, world.rank, 0).backward()
        if inside:
            fails_in_a_backward(fsdp, world.rank, 1)
    if not inside:
        fails_in_a_backward(fsdp, world.rank, 1)
    for goes_on in (lambda: loss_of(fsdp, world.rank, 2), fsdp.synchronize):
        with pytest.raises(RuntimeError, match=r"under no_sync\(\); call zero_grad\(\) of this FSDP"):
            goes_on()
    fsdp.zero_grad()
    loss_of(fsdp, world.rank).backward()
    return gradients_of(fsdp)


def test_an_exception_in_no_sync_is_told_until_zero_grad():
    for got in minipar.run(
        lambda world: [fails_while_it_accumulates(world, i) for i in (0, 1)], world_size=1
    )[0]:
        for name, want in in_one_process(network(), 1).items():
            assert_equal_to(got[name], want.reshape(-1), what=name)


def thawed(world):
    fsdp = FSDP(Net(6, 0), world, Part)
    fsdp.module.frozen.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"frozen\.weight.*was frozen"):
        fsdp(batch(CASE, 0, 0, 0), 0)


def test_a_parameter_thawed_after_wrapping_is_named():
    minipar.run(thawed, world_size=2)


# The whole, in and out --------------------------------------------------------------------------------------------


def in_and_out(world):
    source, net = Net(6, 5), Net(6, 6)
    fsdp = FSDP(net, world, (Part, nn.Linear), algorithm="ring")
    fsdp.load_full_state_dict(source.state_dict())
    state = fsdp.full_state_dict()
    assert state.keys() == source.state_dict().keys()
    for name, value in source.state_dict().items():
        assert torch.equal(state[name], value), name
    with fsdp.summon_full_parameters():
        for (name, p), want in zip(net.named_parameters(), source.parameters()):
            assert torch.equal(p, want), name
        net.out.bias.data.add_(1)
    with fsdp.summon_full_parameters(writeback=False):
        assert torch.equal(net.out.bias, source.out.bias + 1)
        net.out.bias.data.zero_()
    assert torch.equal(fsdp.full_state_dict()["out.bias"], source.out.bias + 1)
    right = source.state_dict()
    for wrong, said in (
        ({k: v for k, v in right.items() if k != "out.bias"}, r"missing: out\.bias"),
        ({**right, "extra": torch.ones(1)}, "unexpected: extra"),
        ({**right, "out.bias": torch.ones(2)}, r"misshapen: out\.bias \(2,\), should be \(13,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            fsdp.load_full_state_dict(wrong)


def test_full_parameters_go_in_and_out_and_what_does_not_fit_is_named():
    for size in (1, 3):
        minipar.run(in_and_out, world_size=size)


CONFIG = ModelConfig(vocab_size=17, dim=16, num_layers=3, num_heads=2, max_seq_len=8, tie_embeddings=True)


def tokens_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 17, (2, 8), generator=generator)


def from_meta(world):
    """The names of the parameters of which this rank made its part, and the weights."""
    with torch.device("meta"):
        model = Transformer(CONFIG, seed=None)
    made = []

    def init(name, shape):
        made.append(name)
        return initial_weight(name, shape, CONFIG, 4)

    with pytest.raises(ValueError, match="on the meta device and init is None"):
        FSDP(model, world, Block)
    fsdp = FSDP(model, world, Block, init=init)
    assert len(made) == len(set(made))
    return made, fsdp.full_state_dict()


def test_a_meta_device_model_gets_the_whole_models_weights():
    want = Transformer(CONFIG, seed=4).state_dict()
    results = minipar.run(from_meta, world_size=3)
    assert {name for made, _ in results for name in made} == {
        n for n, _ in Transformer(CONFIG).named_parameters()
    }
    for _, state in results:
        assert state.keys() == want.keys()
        for name in want:
            assert torch.equal(state[name], want[name]), name


def deferred(world):
    """Weight gradients put off, run after all backwards, then reduced once: as a pipeline does."""
    fsdp = FSDP(Transformer(CONFIG, seed=4, dtype=torch.float64), world, Block, reduce="sum")
    queue = WeightGradients()
    defer_weight_gradients(fsdp.module, queue)
    with fsdp.no_sync():
        for microbatch in range(2):
            tokens = tokens_of(2 * world.rank + microbatch)
            fsdp(tokens).square().sum().backward()
        queue.run()
    fsdp.synchronize()
    torch.optim.SGD(fsdp.parameters(), lr=1e-4).step()
    return fsdp.full_state_dict()


def test_synchronize_reduces_deferred_weight_gradients():
    model = Transformer(CONFIG, seed=4, dtype=torch.float64)
    for i in range(4):
        model(tokens_of(i)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    for state in minipar.run(deferred, world_size=2):
        for name, want in model.state_dict().items():
            assert_equal_to(state[name], want, what=name)
