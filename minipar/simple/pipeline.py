"""Pipelines: rank s of p has stage s; for each of m microbatches it sends activations to s+1 and gradients to s-1.

Time runs to the right; 0 is microbatch 0's forward, AA its backward, twice as long; 1 and BB are those of microbatch 1, ...

    GPipe    stage 0    0123......AABBCCDD        all forwards, then all backwards
             stage 1    .0123...AABBCCDD..
             stage 2    ..0123AABBCCDD....        p = 3, m = 4; the dots are the bubble

    1F1B     stage 0    012....AA3BB.CC.DD        p-1-s forwards, then one forward and one backward in turn,
             stage 1    .01..AA2BB3CC.DD..        then the remaining backwards
             stage 2    ..0AA1BB2CC3DD....

Both idle for (p-1)/m of the compute time. GPipe keeps m microbatches alive from forward to backward, 1F1B min(p-s, m): it
saves memory, not time. Adjacent stages exchange 2m messages.

In the library: minipar.Pipeline, which executes any schedule given as data, and adds interleaved and zero-bubble schedules,
receives posted early, shapes sent between ranks, tied weights, recomputation.
Sources: GPipe, arXiv:1811.06965; PipeDream-Flush (1F1B), arXiv:2104.04473, section 2.2.1.
"""

import torch


def microbatches(batch, m):
    """Cut a batch into m equal parts. A rank between the ends has no batch: it passes None, and gets None m times."""
    if m < 1 or (batch is not None and len(batch) % m):
        raise ValueError(f"{m} microbatches do not divide the batch; minipar.Pipeline says what does")
    return [None] * m if batch is None else batch.chunk(m)


class Stage:
    """A rank's stage during one step. `kept[k]`: microbatch k's input and output, from its forward to its backward."""

    def __init__(self, comm, module, loss_fn, shape, dtype):
        self.comm, self.module, self.loss_fn = comm, module, loss_fn
        self.shape, self.dtype = shape, dtype  # of one microbatch's activation between stages
        self.first, self.last = comm.rank == 0, comm.rank == comm.size - 1
        # One Comm per direction: a send that waits for its receiver must not block messages in the other direction.
        self.activations = comm.subgroup(range(comm.size), "activations")
        self.gradients = comm.subgroup(range(comm.size), "gradients")
        self.kept, self.losses, self.sent = {}, [], []

    def forward(self, k, x, target):
        """Run microbatch k. The first stage uses x, the last stage uses target, the other stages ignore both."""
        if not self.first:
            x = self.activations.recv(self.shape, self.dtype, self.comm.rank - 1).requires_grad_()
        y = self.module(x)
        if self.last:
            y = self.loss_fn(y, target)
            self.losses.append(y.detach())
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
        return sum(self.losses) if self.last else None


def gpipe(comm, module, loss_fn, inputs, targets, m, shape=None, dtype=torch.float32):
    """Add the batch's gradients to `.grad`; return the loss on the last rank. Rank 0 needs `inputs`, the last `targets`."""
    stage = Stage(comm, module, mean_of(loss_fn, m), shape, dtype)
    xs, ts = microbatches(inputs, m), microbatches(targets, m)
    for k in range(m):
        stage.forward(k, xs[k], ts[k])
    for k in range(m):
        stage.backward(k)
    return stage.end()


def one_f_one_b(comm, module, loss_fn, inputs, targets, m, shape=None, dtype=torch.float32):
    """Compute the same gradients as `gpipe`, bit for bit, with fewer microbatches alive."""
    stage = Stage(comm, module, mean_of(loss_fn, m), shape, dtype)
    xs, ts = microbatches(inputs, m), microbatches(targets, m)
    warmup = min(comm.size - 1 - comm.rank, m)  # the loop that follows begins with one more forward
    for k in range(warmup):
        stage.forward(k, xs[k], ts[k])
    for k in range(m - warmup):
        stage.forward(warmup + k, xs[warmup + k], ts[warmup + k])
        stage.backward(k)
    for k in range(m - warmup, m):
        stage.backward(k)
    return stage.end()


def mean_of(loss_fn, m):
    """Return a microbatch's part of the batch's loss, which is the mean over the m microbatches."""
    return lambda y, target: loss_fn(y, target) / m
