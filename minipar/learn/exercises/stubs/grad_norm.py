"""The norm of a whole model's gradient, whichever ranks hold its parts: each element counts once.

    norm^2 = sum over ranks and gradients of |g|^2 / copies

Checked: the norm of one process, also of float32 gradients whose squares overflow; one number sent.
"""


def grad_norm(comm, grads, copies):
    """Return the norm over all ranks, [] in float64.

    grads     this rank's gradients, of any shapes
    copies    for each gradient, the number of ranks that hold the same gradient
    """
    raise NotImplementedError
