"""The library is held to the specifications of the ground floor; wrong answers, the usual ones, are told apart."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from minipar.comm.autograd import _Conjugate
from minipar.learn.museum import floor_faults
from minipar.learn.museum.floor_faults import HookDDP
from minipar.schedules import gpipe
from minipar.simple import autograd, collectives, fsdp, mesh, pipeline, vocab, zero
from minipar.simple import ring_attention as ring
from minipar.spec import SPECIFICATIONS
from minipar.spec.specification import on_ranks
from tests.spec.library import LIBRARY, SPECS, collective


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", SPECS)
def test_the_library_meets_its_specification_on_one_to_four_ranks(name):
    report = SPECS[name].check(LIBRARY[name])
    assert report.ok, str(report)


WITHOUT_A_FORMULA = {  # the other algorithms: the same results, other bytes
    "all_reduce": ("halving_doubling", "tree", "native", "auto"),
    "reduce_scatter": ("halving_doubling", "native", "auto"),
    "all_gather": ("halving_doubling", "native", "auto"),
    "broadcast": ("native", "auto"),
    "all_to_all": ("native", "auto"),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "algorithm"), [(name, a) for name, algorithms in WITHOUT_A_FORMULA.items() for a in algorithms]
)
def test_every_algorithm_meets_the_specification_but_for_the_bytes(name, algorithm):
    stages = [stage.name for stage in SPECIFICATIONS[name].stages if stage.name != "bytes"]
    report = SPECIFICATIONS[name].check(collective(name, algorithm), stages)
    assert report.ok, str(report)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_stage_runs_on_one_to_four_ranks_unless_told(size):
    said = on_ranks(lambda world, f: f"of {world.size}" if world.size == size else None, raises)
    assert said.endswith(f": of {size}")


# Wrong answers ------------------------------------------------------------------------------------------------------


def from_the_wrong_neighbour(comm, chunk):
    p, r = comm.size, comm.rank
    chunks = [chunk] * p
    for step in range(p - 1):  # sends to the right, and waits for the right
        chunks[(r - step - 1) % p] = comm.exchange(
            chunks[(r - step) % p], (r + 1) % p, chunk.shape, chunk.dtype, (r + 1) % p
        )
    return torch.cat(chunks)


def in_another_order(comm, chunk):
    chunks = collectives.all_gather(comm, chunk).chunk(comm.size) if len(chunk) else [chunk]
    return torch.cat(tuple(reversed(chunks)))


def in_place(comm, x):
    return x.copy_(collectives.all_reduce(comm, x))


def added_twice(comm, x):
    return collectives.all_reduce(comm, x) + (x if comm.rank else 0)


def everybodys_and_added(comm, x):
    return comm.all_gather(x.contiguous()[None]).sum(0)


def rounded_apart(comm, x):
    y = collectives.all_reduce(comm, x)
    return y if x.dtype != torch.float32 else y * (1 + comm.rank * 1e-6)


def conjugates(**replaced):
    right = {
        name: getattr(autograd, name) for name in ("copy", "all_reduce", "gather_tokens", "scatter_tokens")
    }
    return SimpleNamespace(**{**right, **replaced})


def copy_without_a_sum(comm, x):
    return x.view_as(x)


def all_reduce_that_sums_back(comm, x):
    return _Conjugate.apply(x, comm.all_reduce, comm.all_reduce)


def without_broadcast(module, comm, **options):
    comm_that_does_not = SimpleNamespace(broadcast=lambda x: x, all_reduce=comm.all_reduce)
    return floor_faults.WaitsInTheHook(module, comm_that_does_not, **options)


class DividesTwice(HookDDP):
    def on_gradient(self, p):
        p.grad = self.comm.all_reduce(p.grad, "mean") / self.comm.size


class KeepsTheState(zero.Zero1):
    """Every rank updates everything: right, and no memory is saved."""

    def __init__(self, params, optimizer_cls, comm, **options):
        super().__init__(params, optimizer_cls, comm, **options)
        self.whole = optimizer_cls(self.params, **options)

    def step(self):
        for p in self.params:
            p.grad = self.comm.all_reduce(p.grad, "mean")
        self.whole.step()


class ForgetsToAccumulate(zero.Zero2):
    def reduce_now(self, p):
        self.gradients.pop(p, None)
        super().reduce_now(p)


class KeepsUnits(fsdp.FSDP):
    def __init__(self, *args):
        super().__init__(*args)
        for unit in self.units:
            unit.free = lambda: None
            unit.gather()


class FrozenInTime(fsdp.FSDP):
    """A unit that was gathered once is not gathered again: the parameters of before the step."""

    def __init__(self, *args):
        super().__init__(*args)
        for unit in self.units:
            unit.free = lambda: None
            unit.gather()
            unit.gather = lambda: None


def mlp_without_copy(comm, x, gate, up, down):
    hidden = torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())
    return autograd.all_reduce(comm, hidden @ down.t())


def mlp_summed_back(comm, x, gate, up, down):
    x = autograd.copy(comm, x)
    hidden = torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())
    return all_reduce_that_sums_back(comm, hidden @ down.t())


def mlp_with_two_copies(comm, x, gate, up, down):
    hidden = torch.nn.functional.silu(autograd.copy(comm, x) @ gate.t()) * (autograd.copy(comm, x) @ up.t())
    return autograd.all_reduce(comm, hidden @ down.t())


def block_without_the_norms_sum(comm, x, norm, gate, up, down):
    h = torch.nn.functional.rms_norm(x, (x.shape[-1],), norm, 1e-5)
    h = autograd.gather_tokens(comm, h)
    hidden = torch.nn.functional.silu(h @ gate.t()) * (h @ up.t())
    return x + autograd.scatter_tokens(comm, hidden @ down.t())


def embedding_of_clamped_tokens(comm, tokens, w):
    local = (tokens - comm.rank * len(w)).clamp(0, len(w) - 1)  # and no zeros for others' tokens
    return autograd.all_reduce(comm, torch.nn.functional.embedding(local, w))


def loss_with_the_ranks_own_maximum(comm, logits, targets):
    class Own:
        size, rank = comm.size, comm.rank

        @staticmethod
        def all_reduce(x, op="sum"):
            return x if op == "max" else comm.all_reduce(x)

    return vocab.cross_entropy(Own, logits, targets)


def pipeline_backwards_in_reverse(comm, module, loss_fn, inputs, targets, m, shape, dtype):
    stage = pipeline.Stage(comm, module, pipeline.mean_of(loss_fn, m), shape, dtype)
    xs, ts = pipeline.microbatches(inputs, m), pipeline.microbatches(targets, m)
    for k in range(m):
        stage.forward(k, xs[k], ts[k])
    for k in reversed(range(m)):
        stage.backward(k)
    return stage.end()


def attention_to_its_own_keys(comm, q, k, v, causal=True):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attention_masked_as_if_each_piece_were_first(comm, q, k, v, causal=True):
    class There:
        size, rank, exchange = comm.size, comm.rank, comm.exchange

    places = ring.scores_of

    def scores(comm, q, k, source, causal):
        return places(SimpleNamespace(rank=0), q, k, 0, causal)

    ring.scores_of = scores
    try:
        return ring.ring_attention(There, q, k, v, causal)
    finally:
        ring.scores_of = places


def tp_slowest(*axes, **sizes):
    swapped = {"pp": "tp", "dp": "cp", "cp": "dp", "tp": "pp"}
    return mesh.groups(*(swapped[a] for a in axes), **{swapped[a]: n for a, n in sizes.items()})


def all_forwards_as_1f1b(p, m):
    return gpipe(p, m)


def gpipe_without_the_last(p, m):
    right = gpipe(p, m)
    return dataclasses.replace(right, actions=tuple(a[:-1] for a in right.actions))


def raises(comm, x):
    return {}["chunk"]


WRONG = [
    ("reduce_scatter", floor_faults.one_step_too_few, "small", "the part of rank [01] is missing"),
    (
        "reduce_scatter",
        raises,
        "runs",
        r"rank \d raised KeyError: 'chunk' \(test_specifications.py, line \d+\)",
    ),
    ("reduce_scatter", lambda comm, x: None, "runs", "it returned a NoneType, not a tensor"),
    ("all_gather", from_the_wrong_neighbour, "runs", "deadlock: rank 0 waits to (send|receive) 32 bytes"),
    ("all_gather", in_another_order, "small", "entry 0 of its result is rank 1's; it should be rank 0's"),
    ("all_reduce", in_place, "runs", r"x \[4\] was written to"),
    ("all_reduce", lambda comm, x: x, "small", "the part of rank 1 is missing"),
    ("all_reduce", added_twice, "small", "the part of rank 1 was added more than once"),
    ("all_reduce", lambda comm, x: comm.all_reduce(x) / comm.size, "small", "it is the mean, not the sum"),
    ("all_reduce", everybodys_and_added, "bytes", r"bytes \(all_gather.*; a ring sends"),
    ("all_reduce", rounded_apart, "order", "differs from rank 0's in rounding"),
    ("broadcast", lambda comm, x, root: comm.broadcast(x, 0), "small", "is rank 0's; it should be rank 1's"),
    ("all_to_all", lambda comm, x, send, recv: x, "small", "the result has shape"),
    ("conjugates", conjugates(copy=copy_without_a_sum), "small", "the gradient of x through copy"),
    (
        "conjugates",
        conjugates(all_reduce=all_reduce_that_sums_back),
        "small",
        "the gradient of x through all_reduce",
    ),
    (
        "ddp",
        floor_faults.WaitsInTheHook,
        "order",
        "waits before the last gradient",
    ),
    (
        "ddp",
        floor_faults.SumsAndNeverDivides,
        "small",
        "exactly 2 times too large: summed, and not divided",
    ),
    ("ddp", DividesTwice, "small", "exactly 2 times too small: divided"),
    (
        "ddp",
        floor_faults.ReducesACopy,
        "small",
        "on 2 ranks: rank 0: the gradient of last.bias",
    ),
    ("ddp", without_broadcast, "small", "does not start with rank 0's values"),
    ("zero1", KeepsTheState, "memory", "something is not cut"),
    ("zero2", zero.Zero1, "memory", "something is not cut"),
    ("zero2", ForgetsToAccumulate, "drawn", "after two backwards and a step"),
    ("fsdp", KeepsUnits, "memory", "bytes are held between steps"),
    ("fsdp", FrozenInTime, "drawn", "the output of forward 1"),
    ("mlp", mlp_without_copy, "small", "the gradient of x"),
    ("mlp", mlp_summed_back, "small", "exactly 2 times too large"),
    ("mlp", mlp_with_two_copies, "bytes", "one sum forward and one backward"),
    ("sequence_parallel", block_without_the_norms_sum, "small", "the gradient of norm"),
    ("vocab_embedding", embedding_of_clamped_tokens, "small", "the rows looked up"),
    ("vocab_loss", loss_with_the_ranks_own_maximum, "small", "the loss of logits"),
    ("pipeline_gpipe", floor_faults.does_not_divide_by_m, "small", "exactly 2 times too large"),
    ("pipeline_gpipe", pipeline_backwards_in_reverse, "drawn", "add microbatches in their order"),
    ("pipeline_one_f_one_b", pipeline.gpipe, "small", "microbatches are alive at once; this order needs"),
    (
        "switch",
        floor_faults.capacity_of_the_whole_batch,
        "drawn",
        "tokens are dropped; with capacity_factor|the output",
    ),
    ("switch", floor_faults.weight_left_out, "runs", "the output"),
    ("ring_attention", attention_to_its_own_keys, "small", "the attention of its queries, causal=False,"),
    (
        "ring_attention",
        attention_masked_as_if_each_piece_were_first,
        "small",
        "the attention of its queries, causal=True,",
    ),
    ("ulysses_attention", ring.ring_attention, "bytes", "all-to-all"),
    ("schedule_1f1b", all_forwards_as_1f1b, "small", "microbatches alive; this order needs"),
    ("schedule_gpipe", gpipe_without_the_last, "runs", "with p=1, m=1: .*B"),
    ("schedule_zb_h1", gpipe, "small", "a rank takes 12; this order takes 10"),
    ("mesh", tp_slowest, "small", r"rank 0 is with \[0, 2\]; it should be with \[0, 1\]"),
]


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("name", "wrong", "stage", "words"), WRONG, ids=lambda x: getattr(x, "__name__", None)
)
def test_the_usual_mistake_is_found_where_it_is_best_understood(name, wrong, stage, words):
    report = SPECIFICATIONS[name].check(wrong)
    assert not report.ok
    assert report.first_wrong.stage in stage.split("|"), str(report)
    assert re.search(words, report.first_wrong.words), str(report)
