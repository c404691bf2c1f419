"""A step of a pipeline: rank s has stage s; activations go to s+1, gradients to s-1, in the order of 1F1B.

Checked: the gradients of one process, bit for bit (add microbatches in their order); m messages per direction between
two stages; min(p-r, m) microbatches alive on rank r.
"""


def one_f_one_b(comm, module, loss_fn, inputs, targets, m, shape, dtype):
    """Add the batch's gradients to the .grad of this rank's stage; return the loss on the last rank, None elsewhere.

    module           this rank's stage
    inputs           the whole batch on rank 0, None elsewhere: cut it into m microbatches along dim 0
    targets          the same on the last rank; loss = mean over microbatches of loss_fn(output, target)
    shape, dtype     those of one microbatch's activation between two stages
    """
    raise NotImplementedError
