"""Pipelines: rank s has stage s of the model; activations travel forward, gradients back, m microbatches one after another.

    GPipe   all forwards, then all backwards     keeps m microbatches alive
    1F1B    rank s first p-1-s forwards,         keeps min(p-s, m): the time the first gradient takes to come back
            then one forward, one backward, ...

Both idle for (p-1)/m of the useful time. 1F1B saves memory, not time. Each rank sends m activations down, m gradients up.

The library's: minipar.Pipeline, which executes any schedule given as data, plus interleaved and zero-bubble schedules,
receives posted early, shapes that ranks tell each other, tied weights, recomputation.
Sources: GPipe, arXiv:1811.06965; PipeDream-Flush (1F1B), arXiv:2104.04473, section 2.2.1.
"""

import torch


class Stage:
    """One stage at work. `kept`: input and output of the microbatches between their forward and their backward."""

    def __init__(self, comm, module, loss_fn, inputs, targets, m, shape, dtype):
        if len(inputs if comm.rank == 0 else targets if comm.rank == comm.size - 1 else range(m)) % m:
            raise ValueError(f"{m} microbatches do not divide the batch; minipar.Pipeline says what does")
        self.comm, self.module, self.loss_fn, self.m = comm, module, loss_fn, m
        # Two directions, two streams: a message that waits for its receiver holds up none of the other direction.
        self.activations = comm.subgroup(range(comm.size), "activations")
        self.gradients = comm.subgroup(range(comm.size), "gradients")
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        self.inputs = inputs.chunk(m) if self.first else None
        self.targets = targets.chunk(m) if self.last else None
        self.shape, self.dtype = shape, dtype  # of what passes between stages, for one microbatch
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
        else:  # do not wait: the next stage may be sending to us first
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
    """Add the gradients of a batch to `.grad`; the loss on the last rank. `inputs` on rank 0, `targets` on the last."""
    stage = Stage(comm, module, loss_fn, inputs, targets, m, shape, dtype)
    for k in range(m):
        stage.forward(k)
    for k in range(m):
        stage.backward(k)
    return stage.end()


def one_f_one_b(comm, module, loss_fn, inputs, targets, m, shape=None, dtype=torch.float32):
    """The same gradients, bit for bit, with fewer microbatches alive."""
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
