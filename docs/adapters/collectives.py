"""torch.distributed's collectives, in the shape in which the specifications call them."""

import torch
import torch.distributed as dist

from minipar.spec import conventions


def all_reduce(comm, x):
    y = x.clone()
    dist.all_reduce(y, group=comm.process_group())
    return y


def all_reduce_(comm, x):
    dist.all_reduce(x, group=comm.process_group())
    return x


@conventions("equal lengths")
def reduce_scatter(comm, x):
    own = x.new_empty(len(x) // comm.size, *x.shape[1:])
    dist.reduce_scatter_tensor(own, x.contiguous(), group=comm.process_group())
    return own


def all_gather(comm, chunk):
    whole = chunk.new_empty(len(chunk) * comm.size, *chunk.shape[1:])
    dist.all_gather_into_tensor(whole, chunk.contiguous(), group=comm.process_group())
    return whole


def broadcast(comm, x, root):
    y = x.clone()
    dist.broadcast(y, group_src=root, group=comm.process_group())
    return y


def all_to_all(comm, x, send_sizes, recv_sizes):
    y = x.new_empty(sum(recv_sizes), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), recv_sizes, send_sizes, group=comm.process_group())
    return y


@conventions("two ranks or more")
def shift(comm, x):
    y, (r, p) = torch.empty_like(x), (comm.rank, comm.size)
    peers = [(dist.isend, x.contiguous(), (r + 1) % p), (dist.irecv, y, (r - 1) % p)]
    ops = [dist.P2POp(op, tensor, group_peer=peer, group=comm.process_group()) for op, tensor, peer in peers]
    for message in dist.batch_isend_irecv(ops):
        message.wait()
    return y
