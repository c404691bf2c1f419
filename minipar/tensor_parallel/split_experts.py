"""Experts, each cut by its hidden features over tp.

Every tp rank routes all tokens, alike, and sends them to the same experts; it has a slice of each of these. What the
slices make of a token is summed once, after the token's experts have been weighed and added up: the sum of k experts'
answers is one row, their own answers would be k.
"""

from __future__ import annotations

from functools import partial

from minipar.comm import autograd
from minipar.model.moe import MoE
from minipar.tensor_parallel.sequence import TOKENS, reduce_scatter_tokens
from minipar.tensor_parallel.shards import cut_parameter, replicate_parameter


def cut_experts(moe: MoE, comm, sequence_parallel: bool) -> MoE:
    """Give each rank the same hidden features of gate and up of every expert, and those of down that meet them.

    gate, up  [E, F/tp, D]    down  [E, D, F/tp]    the router is whole on every rank

    forward    y = sum over ranks of what their features make of x
    backward   dx, and the gradient of the router's weights of the experts, summed over ranks

    Sends 2(tp-1)/tp of B*T*D elements forward and of B*T*(D + k) backward. With `sequence_parallel`, (tp-1)/tp of
    2 B*T*D forward, to gather the tokens and to scatter the sums, and of B*T*(3 D + 2 k) backward.
    """
    for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
        cut = cut_parameter(getattr(moe.experts, name), dim, comm.rank, comm.size)
        setattr(moe.experts, name, cut)
    if moe.shared is not None:
        for linear, dim in ((moe.shared.gate, 0), (moe.shared.up, 0), (moe.shared.down, 1)):
            linear.weight = cut_parameter(linear.weight, dim, comm.rank, comm.size)
    for parameter in moe.router.parameters():
        replicate_parameter(parameter)
    moe.overrides.copy_input = partial(autograd.copy, comm)
    moe.overrides.reduce_output = partial(autograd.all_reduce, comm)
    if sequence_parallel:
        moe.overrides.gather_tokens = partial(autograd.gather, comm, dim=TOKENS)
        moe.overrides.reduce_output = partial(reduce_scatter_tokens, comm)
    return moe
