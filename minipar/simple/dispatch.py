"""Expert parallelism: E experts are sharded over ep ranks; each row is sent to the rank of its expert, and back.

    rank 0 has rows  a0 b1 c3     --dispatch-->    experts 0, 1:  a0 | b1 d1     --combine-->    a0 b1 c3
    rank 1 has rows  d1 e2                         experts 2, 3:  e2 | c3                        d1 e2

    (b1: row b, for expert 1; ep = 2, E = 4)

Dispatch and combine are one all-to-all each. A receiver must know how many rows come, so the counts are gathered first:
8 E (ep-1) bytes. An all-to-all sends (ep-1)/ep of the rows, if routing is balanced; the forward has two, and so does the
backward.

In the library: minipar/expert/dispatch.py, which adds overlap with a shared expert, and an all-to-all on two levels.
Source: GShard, arXiv:2006.16668, section 3.2.
"""

import torch
import torch.nn.functional as F

from .autograd import all_to_all


def dispatch(comm, rows, counts, gate, up, down):
    """Send rows to their experts, run the experts, send the results back: [R, D] -> [R, D], in the order of `rows`.

    rows      [R, D]                             this rank's, sorted by expert
    counts    [E]                                how many of them each expert gets
    gate, up  [E/ep, F, D]    down [E/ep, D, F]  this rank's experts, from number rank * E/ep on
    """
    ep, own = comm.size, len(gate)
    table = comm.all_gather(counts).view(ep, ep, own)  # [from, to, expert of `to`]: how many rows
    to_me = table[:, comm.rank]
    send_sizes, recv_sizes = table[comm.rank].sum(1).tolist(), to_me.sum(1).tolist()
    arrived = all_to_all(comm, rows, send_sizes, recv_sizes)
    segments = list(arrived.split(to_me.flatten().tolist()))  # sorted by source rank, then by expert
    for e in range(own):
        from_each_rank = segments[e::own]
        results = expert(torch.cat(from_each_rank), gate[e], up[e], down[e])
        segments[e::own] = results.split([len(part) for part in from_each_rank])
    return all_to_all(comm, torch.cat(segments), recv_sizes, send_sizes)


def expert(x, gate, up, down):
    """SwiGLU, as the MLP of a dense layer."""
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
