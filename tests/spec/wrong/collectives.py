"""Wrong and unusual collectives other than the five of `minipar.simple.collectives` that test_varied.py has."""

from types import SimpleNamespace

import torch
from torch.autograd import Function

from minipar.comm import halving_doubling, hierarchical
from minipar.simple import autograd, collectives, ring_attention
from minipar.support.chunks import chunk_sizes
from tests.spec.wrong.generic import (
    COLLECTIVE,
    Replaced,
    ZeroBackward,
    backward_wrong_from_five_ranks_on,
    each,
    float64_as_float32,
    has,
    ignores_strides,
    ignores_the_gradient_from_above,
    large,
    nan_as_zero,
    returned,
    stale,
    wrong_in_bfloat16,
)

shift = ring_attention.pass_on


def two_places_on(comm, x):
    p, r = comm.size, comm.rank
    return comm.exchange(x, (r + 2) % p, x.shape, x.dtype, (r - 2) % p)


def last_rank_does_not_wrap(comm, x):
    y = shift(comm, x)
    return y if comm.rank or comm.size < 4 else x.clone()


def even_ranks_send_first(comm, x):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    if comm.size == 1:
        return x.clone()
    if comm.rank % 2:
        y = comm.recv(x.shape, x.dtype, left)
        comm.send(x, right)
        return y
    sending = comm.send(x, right, async_op=True)
    y = comm.recv(x.shape, x.dtype, left)
    sending.wait()
    return y


# In place --------------------------------------------------------------------------------


def with_exchange(change, when=lambda comm, x: True):
    """What every message brings is changed."""

    def wrong(comm, x):
        if not when(comm, x):
            return collectives.all_reduce_(comm, x)
        there = Replaced(comm, exchange=lambda *args: change(comm.exchange(*args)))
        return collectives.all_reduce_(there, x)

    return wrong


def in_place_then(change, when=lambda comm, x: True):
    def wrong(comm, x):
        collectives.all_reduce_(comm, x)
        if when(comm, x):
            change(x)
        return x

    return wrong


def all_reduce_returns_another(comm, x):
    return collectives.all_reduce_(comm, x.clone())


def all_reduce_returns_nothing(comm, x):
    collectives.all_reduce_(comm, x)


def all_reduce_only_once():
    done = []

    def wrong(comm, x):
        if x.shape in done:
            return x
        done.append(x.shape)
        return collectives.all_reduce_(comm, x)

    return wrong


def all_reduce_that_fails_below_p_elements(comm, x):
    if x.numel() < comm.size:
        raise IndexError("no chunk")
    return collectives.all_reduce_(comm, x)


def all_reduce_through_float32(comm, x):
    if x.dtype != torch.int64:
        return collectives.all_reduce_(comm, x)
    return x.copy_(collectives.all_reduce_(comm, x.float()))


def drops_the_tail(comm, x):
    """The elements that p does not divide are left as they are."""
    flat = x.view(-1)
    whole = flat.numel() // comm.size * comm.size
    collectives.all_reduce_(comm, flat[:whole])
    return x


def adds_to_what_arrives(comm, x):
    """Right: each chunk is added to the one that arrives, and copied back."""
    p, r = comm.size, comm.rank
    left, right = (r - 1) % p, (r + 1) % p
    chunks = collectives.cut(x.view(-1), p)
    for step in range(1, p):
        mine = chunks[(r - step - 1) % p]
        arrived = comm.exchange(chunks[(r - step) % p], right, mine.shape, x.dtype, left)
        mine.copy_(arrived.add_(mine))
        del arrived  # before the next one comes
    for step in range(p - 1):
        other = chunks[(r - step - 1) % p]
        other.copy_(comm.exchange(chunks[(r - step) % p], right, other.shape, x.dtype, left))
    return x


# Adjoints --------------------------------------------------------------------------------

OPERATORS = ("copy", "all_reduce", "gather_tokens", "scatter_tokens")


def operators(**mistakes):
    right = {name: getattr(autograd, name) for name in OPERATORS}
    return SimpleNamespace(**{name: mistakes.get(name, lambda f: f)(f) for name, f in right.items()})


class _Pair(Function):
    @staticmethod
    def forward(ctx, x, operator, adjoint):
        ctx.adjoint = adjoint
        return operator(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.adjoint(dy), None, None


def tokens(collective):
    return lambda x: collective(x.transpose(0, 1).contiguous()).transpose(0, 1)


def scatter_that_averages_back(right):
    return lambda comm, x: _Pair.apply(
        x, tokens(comm.reduce_scatter), lambda dy: tokens(comm.all_gather)(dy) / comm.size
    )


def gather_that_only_cuts_back(right):
    return lambda comm, x: _Pair.apply(
        x, tokens(comm.all_gather), lambda dy: dy.chunk(comm.size, 1)[comm.rank]
    )


def gather_from_the_neighbour_back(right):
    def gather(comm, x):
        return _Pair.apply(
            x,
            tokens(comm.all_gather),
            lambda dy: comm.all_reduce(dy.contiguous()).chunk(comm.size, 1)[(comm.rank + 1) % comm.size],
        )

    return gather


def copy_that_forgets_the_last_rank(right):
    return lambda comm, x: _Pair.apply(
        x,
        lambda x: x.clone(),
        lambda dy: comm.all_reduce(dy if comm.rank < max(1, comm.size - 1) else torch.zeros_like(dy)),
    )


def backward_in_float32(right):
    return lambda comm, x: _Pair.apply(
        x, lambda x: x.clone(), lambda dy: comm.all_reduce(dy.float()).to(dy.dtype)
    )


def backward_without_nan(right):
    return lambda comm, x: _Pair.apply(x, lambda x: x.clone(), lambda dy: comm.all_reduce(nan_as_zero(dy)))


def backward_ignores_strides(right):
    def dense(dy):
        return dy if dy.is_contiguous() else dy.as_strided(dy.shape, torch.empty(dy.shape).stride())

    return lambda comm, x: _Pair.apply(x, lambda x: x.clone(), lambda dy: comm.all_reduce(dense(dy)))


def all_reduce_in_place(right):
    return lambda comm, x: _Pair.apply(
        x, lambda x: x.detach().copy_(comm.all_reduce(x)).clone(), lambda dy: dy
    )


def gather_by_all_reduce(right):
    """Right: everybody's tokens, where the others have zeros, added up."""

    def forward(comm, x):
        whole = x.new_zeros(x.shape[0], x.shape[1] * comm.size, x.shape[2])
        whole[:, comm.rank * x.shape[1] : (comm.rank + 1) * x.shape[1]] = x
        return comm.all_reduce(whole)

    return lambda comm, x: _Pair.apply(
        x,
        lambda x: forward(comm, x),
        lambda dy: comm.all_reduce(dy.contiguous()).chunk(comm.size, 1)[comm.rank].clone(),
    )


def dense_results(right):
    return lambda comm, x: right(comm, x).contiguous()


def with_another_node(comm, x, *, node_size):
    return hierarchical.all_reduce(comm, x, node_size=1)


def hierarchical_refuses_nothing(comm, x, *, node_size):
    return hierarchical.all_reduce(comm, x, node_size=node_size if comm.size % node_size == 0 else comm.size)


def hierarchical_pads(comm, x, *, node_size):
    """Right: the textbook's three collectives, on a padded vector."""
    if comm.size % node_size:
        raise ValueError(f"node_size {node_size} does not divide {comm.size} ranks")
    flat = x.reshape(-1)
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % node_size)])
    node, place = divmod(comm.rank, node_size)
    inside = comm.subgroup(range(node * node_size, (node + 1) * node_size), "inside")
    across = comm.subgroup(range(place, comm.size, node_size), "across")
    chunk = inside.reduce_scatter(padded, algorithm="ring")
    chunk = across.all_reduce(chunk, algorithm="ring")
    return inside.all_gather(chunk, algorithm="ring")[: len(flat)].view(x.shape)


# Rings and trees -------------------------------------------------------------------------


def rows_turned(right):
    """Right parts, the last rank's in the first one's place."""

    def wrong(comm, x, *args):
        y = right(comm, x, *args)
        return y.roll(1, 0) if len(y) > 1 else y

    return wrong


def adds_its_part_twice_from_four_ranks_on(comm, x):
    y = collectives.reduce_scatter(comm, x)
    return y + collectives.cut(x, comm.size)[comm.rank] if comm.size >= 4 else y


def own_part_in_its_neighbours_place(comm, x):
    y = collectives.all_gather(comm, x).clone()
    n, right = len(x), (comm.rank + 1) % comm.size
    y[right * n : (right + 1) * n] = x
    return y


def from_the_next_root(comm, x, root):
    return collectives.broadcast(comm, x, (root + 1) % comm.size)


def by_equal_sizes(comm, x, send_sizes, recv_sizes):
    """The sizes that were asked for are not looked at."""
    return comm.all_to_all(x, chunk_sizes(len(x), comm.size), chunk_sizes(len(x), comm.size))


def without_an_exchange(right):
    """Right: every exchange is a send that is waited for after the receive."""

    def unusual(comm, *args):
        def exchange(x, to, shape, dtype, source):
            sending = comm.send(x, to, async_op=True)
            y = comm.recv(shape, dtype, source)
            sending.wait()
            return y

        return right(Replaced(comm, exchange=exchange), *args)

    return unusual


def ring_to_the_left(comm, x):
    """Right: the parts go around the ring in the other direction, the last step first."""
    p, r = comm.size, comm.rank
    chunks = [x] * p
    for step in range(p - 1):
        arrived = comm.exchange(chunks[(r + step) % p], (r - 1) % p, x.shape, x.dtype, (r + 1) % p)
        chunks[(r + step + 1) % p] = arrived
    return torch.cat(chunks)


def largest_distance_first(comm, x, send_sizes, recv_sizes):
    """Right: the steps from the last to the first."""
    p, r = comm.size, comm.rank
    sent = x.split(send_sizes)
    received = [sent[r]] * p
    for step in reversed(range(1, p)):
        to, source = (r + step) % p, (r - step) % p
        shape = recv_sizes[source], *x.shape[1:]
        received[source] = comm.exchange(sent[to].contiguous(), to, shape, x.dtype, source)
    return torch.cat(received)


def by_halves(comm, x, root):
    """Right: whoever has x gives it to the first of the other half of its places, then goes on with its own half."""
    p = comm.size
    place = (comm.rank - root) % p
    begin, length = 0, 1 << (p - 1).bit_length()
    y = x.clone() if place == 0 else None
    while length > 1:
        length //= 2
        middle = begin + length
        if place == begin and middle < p:
            comm.send(y, (middle + root) % p)
        elif place == middle:
            y = comm.recv(x.shape, x.dtype, (begin + root) % p)
        begin = middle if place >= middle else begin
    return y


WRONG = {
    "reduce_scatter": {
        **each(COLLECTIVE, collectives.reduce_scatter),
        "adds its part twice from four ranks on": adds_its_part_twice_from_four_ranks_on,
        "rows turned": rows_turned(collectives.reduce_scatter),
    },
    "all_gather": {
        **each(COLLECTIVE, collectives.all_gather),
        "own part in its neighbour's place": own_part_in_its_neighbours_place,
        "rows turned": rows_turned(collectives.all_gather),
    },
    "all_reduce": each(COLLECTIVE, collectives.all_reduce),
    "broadcast": {
        **each(COLLECTIVE, collectives.broadcast),
        "from the next root": from_the_next_root,
        "rows turned": rows_turned(collectives.broadcast),
    },
    "all_to_all": {
        **each(COLLECTIVE, collectives.all_to_all),
        "by equal sizes": by_equal_sizes,
        "rows turned": rows_turned(collectives.all_to_all),
    },
    "shift": {
        **each(COLLECTIVE, shift),
        "two places on": two_places_on,
        "the last rank does not wrap from four ranks on": last_rank_does_not_wrap,
    },
    "all_reduce_": {
        "float64 as float32": with_exchange(
            lambda y: y.float().to(y.dtype) if y.dtype == torch.float64 else y
        ),
        "zero from 1,000 elements on": in_place_then(torch.zero_, large),
        "wrong from five ranks on": in_place_then(lambda x: x.mul_(2), lambda comm, x: comm.size >= 5),
        "wrong in bfloat16": in_place_then(lambda x: x.mul_(2), has(torch.bfloat16)),
        "integers through float32": all_reduce_through_float32,
        "nan is zero": with_exchange(lambda y: nan_as_zero(y) if y.is_floating_point() else y),
        "another tensor": all_reduce_returns_another,
        "returns nothing": all_reduce_returns_nothing,
        "only once for a shape": all_reduce_only_once(),
        "fails below p elements": all_reduce_that_fails_below_p_elements,
        "drops the tail": drops_the_tail,
    },
    "halving_doubling": each(COLLECTIVE, halving_doubling.all_reduce),
    "hierarchical": {
        **each(COLLECTIVE, hierarchical.all_reduce, "one buffer"),
        "another node": with_another_node,
        "refuses nothing": hierarchical_refuses_nothing,
    },
    "conjugates": {
        "copy: float64 as float32 in the backward": operators(copy=backward_in_float32),
        "copy: ignores the gradient from above": operators(copy=ignores_the_gradient_from_above),
        "copy: forgets the last rank": operators(copy=copy_that_forgets_the_last_rank),
        "copy: nan is zero in the backward": operators(copy=backward_without_nan),
        "copy: ignores strides in the backward": operators(copy=backward_ignores_strides),
        "copy: backward wrong from five ranks on": operators(copy=backward_wrong_from_five_ranks_on),
        "all_reduce: float64 as float32": operators(all_reduce=float64_as_float32),
        "all_reduce: in place": operators(all_reduce=all_reduce_in_place),
        "all_reduce: stale": operators(all_reduce=stale),
        "all_reduce: backward zero from 1,000 elements on": operators(
            all_reduce=returned(ZeroBackward.apply, large)
        ),
        "gather_tokens: only cuts back": operators(gather_tokens=gather_that_only_cuts_back),
        "gather_tokens: the neighbour's back": operators(gather_tokens=gather_from_the_neighbour_back),
        "gather_tokens: ignores strides": operators(gather_tokens=ignores_strides),
        "gather_tokens: wrong in bfloat16": operators(gather_tokens=wrong_in_bfloat16),
        "scatter_tokens: averages back": operators(scatter_tokens=scatter_that_averages_back),
        "scatter_tokens: ignores strides": operators(scatter_tokens=ignores_strides),
    },
}
RIGHT = {
    "reduce_scatter": {"without an exchange": without_an_exchange(collectives.reduce_scatter)},
    "all_reduce": {"without an exchange": without_an_exchange(collectives.all_reduce)},
    "all_gather": {"ring to the left": ring_to_the_left},
    "broadcast": {"by halves": by_halves},
    "all_to_all": {"largest distance first": largest_distance_first},
    "halving_doubling": {"of the negative": lambda comm, x: halving_doubling.all_reduce(comm, -x).neg_()},
    "shift": {"even ranks send first": even_ranks_send_first},
    "all_reduce_": {"adds to what arrives": adds_to_what_arrives},
    "hierarchical": {"pads": hierarchical_pads},
    "conjugates": {
        "gather by all-reduce": operators(gather_tokens=gather_by_all_reduce),
        "dense results": operators(gather_tokens=dense_results, scatter_tokens=dense_results),
    },
}
