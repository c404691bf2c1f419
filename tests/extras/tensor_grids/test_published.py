"""Costs of tensor-parallel layouts as papers and documentation print them: reproduced, or corrected."""

from __future__ import annotations

from fractions import Fraction
from math import log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.extras.tensor_grids.cube import CubeLinear
from minipar.extras.tensor_grids.grid import SummaLinear
from minipar.extras.tensor_grids.linear_costs import Cost, column_cost, cube_cost, row_cost, summa_cost
from minipar.model import Linear
from minipar.tensor_parallel import ColumnParallelLinear

DOUBLE = 8
sides, depths = st.integers(2, 9), st.integers(1, 5)

# Colossal-AI's documentation, "Efficiency" in its pages on 1D, 2D, 2.5D and 3D tensor parallelism ---------------------
# Of one linear layer whose input, weight and output count as 1 each.


def whole(cost, *ranks, **depth) -> Cost:
    return cost(*ranks, 1, 1, 1, **depth)


def weight_share(cost, *ranks, **depth) -> Fraction:
    return cost(*ranks, 0, 1, 1, **depth).held


def input_share(cost, *ranks, **depth) -> Fraction:
    return cost(*ranks, 1, 1, 0, **depth).held


@given(sides, depths)
def test_a_rank_holds_what_colossal_ai_prints(q, d):
    """Parameters 1/P, 1/q^2, 1/q^2, 1/q^3 and activations 1, 1/q^2, 1/(d q^2), 1/q^3."""
    assert weight_share(column_cost, q) == Fraction(1, q)
    assert weight_share(summa_cost, q**2) == Fraction(1, q**2)
    assert weight_share(summa_cost, d * q**2, depth=d) == Fraction(1, q**2)
    assert weight_share(cube_cost, q**3) == Fraction(1, q**3)
    assert input_share(column_cost, q) == 1
    assert input_share(summa_cost, q**2) == Fraction(1, q**2)
    assert input_share(summa_cost, d * q**2, depth=d) == Fraction(1, d * q**2)
    assert input_share(cube_cost, q**3) == Fraction(1, q**3)


@given(sides, depths)
def test_colossal_ais_printed_bandwidth_is_right_only_in_1d(q, d):
    """In 2D and 2.5D it is q times too large, in 2.5D without the sum over layers, in 3D without gathering again.

    6(q-1)/q of 2D would be a broadcast to q ranks one after another, q of them, in q steps: but with 6(q-1) messages, as
    the page says too, each of a block of 1/q^2, a rank sends 6(q-1)/q^2. 3D's 6(q-1)/q^3 keeps the gathered input and
    weight for the backward, q times the 1/q^3 that the same page prints.
    """
    assert whole(column_cost, q).sent == Fraction(2 * (q - 1), q)
    assert whole(summa_cost, q**2).sent * q == Fraction(6 * (q - 1), q)
    over_layers = Fraction(2 * (d - 1), d * q**2)
    assert (whole(summa_cost, d * q**2, depth=d).sent - over_layers) * q == Fraction(
        3 * (q - 1) * (d + 1), d * q
    )
    gathered_again = Fraction(2 * (q - 1), q**3)
    assert whole(cube_cost, q**3).sent - gathered_again == Fraction(6 * (q - 1), q**3)


def messages(world, layout: str) -> int:
    """The messages that this rank sends for one layer, forward and backward."""
    comm, x = world.using("ring"), torch.randn(8, 8)
    layer = Linear(8, 8)
    if layout == "1D":
        cut = ColumnParallelLinear.from_linear(layer, comm)
    elif layout == "3D":
        cut = CubeLinear.from_linear(layer, comm)
        x = cut.input(8, 8).slice_of(x).clone()
    else:
        cut = SummaLinear.from_linear(layer, comm, depth=2 if layout == "2.5D" else 1)
        x = cut.activation(8, 8).slice_of(x).clone()
    comm.traffic.reset()
    cut(x.requires_grad_()).sum().backward()
    return comm.traffic.messages


LATENCY = {  # layout: ranks, messages printed, and those that the page leaves out
    "1D": (4, 2 * (4 - 1), 0),
    "2D": (4, 6 * (2 - 1), 0),
    "2.5D": (8, 6 * (2 - 1), 2 * (2 - 1)),  # the sum over layers
    "3D": (8, 6 * (2 - 1), 2 * (2 - 1)),  # gathering again
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LATENCY)
def test_a_rank_sends_as_many_messages_as_colossal_ai_prints(layout):
    ranks, printed, left_out = LATENCY[layout]
    assert minipar.run(messages, layout, world_size=ranks) == [printed + left_out] * ranks


# Optimus, arXiv:2104.05343, table 1: what a GPT layer communicates, in elements; b s tokens, h features, p ranks --------


def gpt_layer(h: int) -> list[tuple[int, int]]:
    """(input, output) features of its four matrices."""
    return [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]


@given(st.integers(2, 64), st.integers(1, 99), st.integers(1, 99))
def test_megatrons_row_of_optimus_is_what_a_rank_sends(p, tokens, h):
    """Forward 4(p-1)/p bsh, backward 8(p-1)/p bsh, of which the half is the forward, repeated."""
    qkv, out, up, down = gpt_layer(h)
    forward = sum(row_cost(p, tokens, *matrix).sent for matrix in (out, down))
    backward = sum(column_cost(p, tokens, *matrix).sent for matrix in (qkv, up))
    assert forward == Fraction(4 * (p - 1) * tokens * h, p)
    assert forward + backward == Fraction(8 * (p - 1) * tokens * h, p)


def optimus(p: int, tokens: int, h: int) -> float:
    """Optimus's own row, forward; the backward is three times as much, forward repeated."""
    return log2(p) / (2 * p**0.5) * (7 * tokens * h + 12 * h * h)


@given(sides, st.integers(1, 99), st.integers(1, 99))
def test_optimus_prints_the_time_of_trees_one_after_another(q, tokens, h):
    """A tree has the data everywhere after log q sends of a block, and ranks send it (q-1)/q times on average.

    So log(p)/(2 sqrt(p)) (7bsh + 12h^2) is q log(q) / (q-1) times the elements that a rank sends.
    """
    sent = sum(summa_cost(q * q, tokens, *matrix).sent for matrix in gpt_layer(h))
    forward = sent / 3
    assert forward == Fraction(q - 1, q * q) * (7 * tokens * h + 12 * h * h)
    assert optimus(q * q, tokens, h) == pytest.approx(float(forward) * q * log2(q) / (q - 1))


def layer_forward(world, tokens: int, h: int) -> int:
    comm = world.using("ring")
    layers = [SummaLinear.from_linear(Linear(*matrix).double(), comm) for matrix in gpt_layer(h)]
    comm.traffic.reset()
    with torch.no_grad():
        for layer in layers:
            layer(torch.zeros(tokens // 2, layer.weight.shape[1], dtype=torch.float64))
    return comm.traffic.sent_bytes


def root_sends(world) -> list[int]:
    """Bytes that each rank sends as the root of a tree."""
    sent = []
    for root in range(world.size):
        world.traffic.reset()
        world.broadcast(torch.zeros(3), root=root, algorithm="tree")
        sent.append(world.traffic.sent_bytes)
    return sent[world.rank]


def test_ranks_send_the_forward_of_optimus_and_roots_log_q_blocks():
    tokens, h = 6, 4
    want = (7 * tokens * h + 12 * h * h) // 4 * DOUBLE
    assert minipar.run(layer_forward, tokens, h, world_size=4) == [want] * 4
    assert minipar.run(root_sends, world_size=4) == [2 * 3 * 4] * 4
