"""Pipelines: rank s of p has stage s; for each of m microbatches it sends activations to s+1 and gradients to s-1.

    GPipe   all forwards, then all backwards                 keeps m microbatches alive
    1F1B    p-1-s forwards, then one forward and one         keeps min(p-s, m): the forwards before the first backward
            backward in turn, then the remaining backwards

Both idle for (p-1)/m of the compute time (the bubble): 1F1B saves memory, not time. Adjacent stages exchange 2m messages.

In the library: minipar.Pipeline, which executes any schedule given as data, and adds interleaved and zero-bubble schedules,
receives posted early, shapes sent between ranks, tied weights, recomputation.
Sources: GPipe, arXiv:1811.06965; PipeDream-Flush (1F1B), arXiv:2104.04473, section 2.2.1.
"""

import torch


class Stage:
    """A rank's stage during one step. `kept[k]`: microbatch k's input and output, from its forward to its backward."""

    def __init__(self, comm, module, loss_fn, inputs, targets, m, shape, dtype):
        own = inputs if comm.rank == 0 else targets if comm.rank == comm.size - 1 else range(m)
        if m < 1 or len(own) % m:
            raise ValueError(f"{m} microbatches do not divide the batch; minipar.Pipeline says what does")
        self.comm, self.module, self.loss_fn, self.m = comm, module, loss_fn, m
        # One Comm per direction: a send that waits for its receiver must not block messages in the other direction.
        self.activations = comm.subgroup(range(comm.size), "activations")
        self.gradients = comm.subgroup(range(comm.size), "gradients")
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        self.inputs, self.targets = (x.chunk(m) if x is not None else None for x in (inputs, targets))
        self.shape, self.dtype = shape, dtype  # of one microbatch's activation between stages
        self.kept, self.loss, self.sent = {}, 0.0, []

    def forward(self, k):
        if self.first:
            x = self.inputs[k]
        else:
            x = self.activations.recv(self.shape, self.dtype, self.comm.rank - 1).requires_grad_()
        y = self.module(x)
        if self.last:
            y = self.loss_fn(y, self.targets[k]) / self.m  # the batch's loss is the mean over microbatches
            self.loss = self.loss + y.detach()
        else:  # not waited for: the next stage may be sending to this one at the same time
            self.sent.append(self.activations.send(y.detach(), self.comm.rank + 1, async_op=True))
        self.kept[k] = x, y

    def backward(self, k):
        x, y = self.kept.pop(k)
        dy = None if self.last else self.gradients.recv(y.shape, y.dtype, self.comm.rank + 1)
        torch.autograd.backward(y, dy)
        if not self.first:
            self.sent.append(self.gradients.send(x.grad, self.comm.rank - 1, async_op=True))

    def end(self):
        for handle in self.sent:
            handle.wait()
        return self.loss if self.last else None


def gpipe(comm, module, loss_fn, inputs, targets, m, shape=None, dtype=torch.float32):
    """Add the batch's gradients to `.grad`; return the loss on the last rank. Rank 0 needs `inputs`, the last `targets`."""
    stage = Stage(comm, module, loss_fn, inputs, targets, m, shape, dtype)
    for k in range(m):
        stage.forward(k)
    for k in range(m):
        stage.backward(k)
    return stage.end()


def one_f_one_b(comm, module, loss_fn, inputs, targets, m, shape=None, dtype=torch.float32):
    """Compute the same gradients as `gpipe`, bit for bit, with fewer microbatches alive."""
    stage = Stage(comm, module, loss_fn, inputs, targets, m, shape, dtype)
    warmup = min(comm.size - 1 - comm.rank, m)
    for k in range(warmup):
        stage.forward(k)
    for k in range(m - warmup):
        stage.forward(warmup + k)
        stage.backward(k)
    for k in range(m - warmup, m):
        stage.backward(k)
    return stage.end()
