"""An MoE layer with each expert split by its hidden features over tp.

Every tp rank routes all tokens, with equal results, and holds a slice of each expert. The outputs of the slices are summed
over ranks only after the experts are combined: one row per token is sent, not k.
"""

from __future__ import annotations

from functools import partial

from minipar.comm import Comm, autograd
from minipar.model.moe import MoE
from minipar.tensor_parallel.sequence import TOKEN_DIM, reduce_scatter_tokens
from minipar.tensor_parallel.shards import replicate_parameter, shard_parameter


def split_experts(moe: MoE, comm: Comm, sequence_parallel: bool) -> MoE:
    """Keep this rank's hidden features of every expert, in place: rows of gate and up, and the same columns of down.

    gate, up  [E, F/tp, D]    down  [E, D, F/tp]    the shared expert likewise; the router is whole on every rank

    forward    y = sum over ranks of each rank's combined expert outputs
    backward   dx and the gradient of the combine weights [B*T, k], both summed over ranks

    Sends 2(tp-1)/tp * B*T*D elements forward, and 2(tp-1)/tp * B*T*(D + k) backward. With `sequence_parallel`, sends
    (tp-1)/tp * 2 B*T*D forward, to gather the tokens and to scatter the sums, and (tp-1)/tp * B*T*(3 D + 2 k) backward.
    Under expert choice any expert may choose a token, so k is num_experts.
    """
    for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
        cut = shard_parameter(getattr(moe.experts, name), dim, comm.rank, comm.size)
        setattr(moe.experts, name, cut)
    if moe.shared is not None:
        for linear, dim in ((moe.shared.gate, 0), (moe.shared.up, 0), (moe.shared.down, 1)):
            linear.weight = shard_parameter(linear.weight, dim, comm.rank, comm.size)
    for parameter in moe.router.parameters():
        replicate_parameter(parameter)
    moe.overrides.copy_input = partial(autograd.copy, comm)
    moe.overrides.reduce_output = partial(autograd.all_reduce, comm)
    if sequence_parallel:
        moe.overrides.gather_tokens = partial(autograd.gather, comm, dim=TOKEN_DIM)
        moe.overrides.reduce_output = partial(reduce_scatter_tokens, comm)
    return moe
