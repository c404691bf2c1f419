"""Sequence parallelism's communication in pieces: the same numbers and bytes, and each piece under way behind a product."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.model.deferrable_linear import WeightGradients, linear
from minipar.tensor_parallel import ShardedWeight, column_parallel, gather_matmul, matmul_scatter
from minipar.tensor_parallel import chunked as module
from minipar.tensor_parallel.sequence import reduce_scatter_tokens
from tests.model.products import CountProducts
from tests.strategies import assert_equal_to, seeds, world_sizes


def leaves(seed: int, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def run_and_count(comm, function, dys, inputs):
    before = comm.traffic.sent_bytes
    ys = function(*inputs)
    torch.autograd.backward(ys, dys)
    gradients = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    return ys, gradients, comm.traffic.sent_bytes - before


def compare(world, batch: int, tokens: int, seed: int) -> None:
    comm, p = world.using("ring"), world.size
    x, w, v = leaves(seed + world.rank, (batch, tokens, 3), (4, 3), (2, 3))
    dys = leaves(seed, (batch, tokens * p, 4), (batch, tokens * p, 2))
    whole = run_and_count(
        comm,
        lambda x, w, v: column_parallel(comm, x, [ShardedWeight(w), ShardedWeight(v)], True),
        dys,
        (x, w, v),
    )
    pieces = run_and_count(
        comm, lambda x, w, v: gather_matmul(comm, x, [ShardedWeight(w), ShardedWeight(v)]), dys, (x, w, v)
    )
    assert pieces[2] == whole[2] == 3 * (p - 1) * x.nbytes
    for a, b in zip((*pieces[0], *pieces[1]), (*whole[0], *whole[1])):
        assert_equal_to(a.detach(), b.detach())

    x, w = leaves(seed + world.rank, (batch, tokens * p, 3), (4, 3))
    (dy,) = leaves(seed, (batch, tokens, 4))
    whole = run_and_count(comm, lambda x, w: [reduce_scatter_tokens(comm, linear(x, w))], [dy], (x, w))
    pieces = run_and_count(comm, lambda x, w: [matmul_scatter(comm, x, w)], [dy], (x, w))
    assert pieces[2] == whole[2] == 2 * (p - 1) * dy.nbytes
    for a, b in zip((*pieces[0], *pieces[1]), (*whole[0], *whole[1])):
        assert_equal_to(a.detach(), b.detach())


@given(world_sizes, st.integers(1, 2), st.integers(1, 3), seeds)
def test_in_pieces_or_whole_numbers_and_bytes_are_the_same(p, batch, tokens, seed):
    minipar.run(compare, batch, tokens, seed, world_size=p)


def deferred_only(world) -> tuple[list, list[torch.Tensor]]:
    """x needs no gradient, and the weight's waits: there is still a backward to wait for. Then dw, late and at once."""
    queue = WeightGradients()
    x, w = leaves(world.rank, (1, 2, 3), (4, 3))
    (y,) = gather_matmul(world, x.detach(), [ShardedWeight(w, queue)])
    z = matmul_scatter(world, x.detach(), w, queue)
    (y.sum() + z.sum()).backward()
    waiting, before = len(queue), w.grad
    queue.run()
    late, w.grad = w.grad, None
    (y,) = gather_matmul(world, x.detach(), [ShardedWeight(w)])
    (y.sum() + matmul_scatter(world, x.detach(), w).sum()).backward()
    return [waiting, before], [late, w.grad]


def test_a_weight_that_waits_needs_no_other_gradient():
    for waiting, (late, at_once) in minipar.run(deferred_only, world_size=2):
        assert waiting == [2, None]
        assert_equal_to(late, at_once)


def of_a_computed_weight(world, queue: WeightGradients | None) -> torch.Tensor:
    """The gradient of the weight from which two layers' weights are computed."""
    x, w = leaves(world.rank, (1, 2, 3), (4, 3))
    (y,) = gather_matmul(world, x, [ShardedWeight(2 * w, queue)])
    (y.sum() + matmul_scatter(world, x, 3 * w, queue).sum()).backward()
    assert not queue
    return w.grad


def test_a_computed_weights_gradient_does_not_wait():
    def gradients(world):
        return [of_a_computed_weight(world, queue) for queue in (WeightGradients(), None)]

    for with_a_queue, without in minipar.run(gradients, world_size=2):
        assert_equal_to(with_a_queue, without)


def without_needless_products(world) -> tuple[list[int], list[int], list[bool]]:
    """Matrix products backward, and bytes, where the input or the weight needs no gradient."""
    comm, products, sent = world.using("ring"), [], []
    x, w = leaves(world.rank, (1, 2 * world.size, 3), (4, 3))
    own = x.detach()[:, : x.shape[1] // world.size].requires_grad_()
    for y in (
        matmul_scatter(comm, x.detach(), w),
        matmul_scatter(comm, x, w.detach()),
        gather_matmul(comm, own, [ShardedWeight(w.detach())])[0],
    ):
        before = comm.traffic.sent_bytes
        with CountProducts() as counted:
            y.backward(torch.ones_like(y))
        products.append(counted.count)
        sent.append((comm.traffic.sent_bytes - before) // 8)
    return products, sent, [x.grad is not None, w.grad is not None, own.grad is not None]


def test_unneeded_gradients_are_neither_computed_nor_sent_for():
    p = 2
    chunk_of_y, chunk_of_x = 2 * 4, 2 * 3
    want = ([p, p, p], [(p - 1) * chunk_of_y, (p - 1) * chunk_of_y, (p - 1) * chunk_of_x], [True] * 3)
    assert minipar.run(without_needless_products, world_size=p) == [want] * p


def events_of(world) -> list[str]:
    """The order in which pieces leave, are multiplied and are waited for."""
    events, exchange, product = [], world.exchange, F.linear

    def leaving(*args, **kwargs):
        handle = exchange(*args, **kwargs)
        events.append("leave")

        class Watched:
            def wait(self):
                events.append("wait")
                return handle.wait()

        return Watched()

    def multiplied(*args):
        events.append("multiply")
        return product(*args)

    x, w = leaves(0, (1, 2, 3), (4, 3))
    world.exchange, module.F.linear = leaving, multiplied
    try:
        gather_matmul(world, x, [ShardedWeight(w)])
        events.append("|")
        matmul_scatter(world, torch.cat([x] * world.size, 1), w)
    finally:
        module.F.linear = product
        del world.exchange
    return events


def test_every_piece_travels_while_another_is_multiplied():
    for events in minipar.run(events_of, world_size=3):
        gather, scatter = " ".join(events).split(" | ")
        assert gather == "leave multiply wait leave multiply wait multiply"
        assert scatter == "multiply leave multiply wait leave multiply wait"
