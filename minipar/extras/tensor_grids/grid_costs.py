"""Formulas for the elements that each rank sends in a step of the model on a grid or a cube. Imports no torch.

    M tokens, V words, t ranks: R = d q rows and C = q columns of ranks on a grid, R = p^2 and C = p on a cube

    layer       linear(D, D_q + 2 D_kv) + linear(D_q, D) + linear(D, 2 F) + linear(F, D)     linear: see `linear_costs.py`
    norm        4 (C-1)/C M/R + 2 (R-1)/R D/C                                            two per layer, and the last norm
    embedding   2 q V D/q^2 + 2 (d-1)/d V D/q^2, less 2 V D/q^2 if i = j              on a grid
                2 (p^2 - 1) V D/p^3                                                      on a cube
    head        linear(D, V)
    loss        6 (C-1)/C M/R + 2 (R-1)/R

The norms' squares and the loss's three values per token are in float32 or wider. Matrices with the same input count as one
wide matrix. Apart from norms, a layer with W weights sends 3 (q-1)/t (3 M D + M F + W) on a square, which decreases as t
grows; 1D sends 8 M D (t-1)/t, and no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from minipar.config.model_config import ModelConfig
from minipar.extras.tensor_grids.limits import grid_shape
from minipar.extras.tensor_grids.linear_costs import cube_cost, summa_cost


def grid_step_elems(
    config: ModelConfig, layout: str, t: int, tokens: int, depth: int = 1, diagonal: bool = False
) -> Fraction:
    """Return the number of elements that a rank of `grid_parallel` sends in a step, forward and backward.

    tokens    tokens of the batch, over all samples
    diagonal  True: count for a rank (i, i) of a grid, which need not exchange its block of the embedding

    In the all-reduce of the loss, a single element, some ranks send more than others; the mean over ranks is counted.
    """
    rows, columns = grid_shape(t, layout, depth)
    linear = _linear(layout, t, tokens, depth)
    dim, vocab = config.dim, config.vocab_size
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = linear(dim, q_dim + 2 * kv_dim) + linear(q_dim, dim)
    layer += linear(dim, 2 * config.hidden_dim) + linear(config.hidden_dim, dim)
    norms = (1 if config.parallel_block else 2) * config.num_layers + 1
    per_token, of_rows = Fraction(2 * (columns - 1), columns), Fraction(2 * (rows - 1), rows)
    norm = 2 * per_token * Fraction(tokens, rows) + of_rows * Fraction(dim, columns)
    loss = 3 * per_token * Fraction(tokens, rows) + of_rows
    embedding = _embedding(layout, t, vocab * dim, depth, diagonal)
    return config.num_layers * layer + norms * norm + embedding + linear(dim, vocab) + loss


def _linear(layout: str, t: int, tokens: int, depth: int) -> Callable[[int, int], Fraction]:
    cost = cube_cost if layout == "3d" else partial(summa_cost, depth=depth)
    return lambda d_in, d_out: cost(t, tokens, d_in, d_out).sent


def _embedding(layout: str, t: int, elems: int, depth: int, diagonal: bool) -> Fraction:
    rows, q = grid_shape(t, layout, depth)
    if layout == "3d":
        return Fraction(2 * (rows - 1) * elems, t)
    block = Fraction(elems, q * q)
    return (2 * (q - diagonal) + Fraction(2 * (depth - 1), depth)) * block
