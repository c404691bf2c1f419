"""What the tests of context parallelism run on every rank, and the one process they compare it with."""

import torch

from tests.context.strategies import Case
from tests.strategies import assert_equal_to


def compare(world, case: Case) -> None:
    """A padding query's output means nothing; its gradient is zero here, as where a loss ignores it."""
    whole = [x.requires_grad_() for x in case.qkv()]
    mine = [case.local(x.detach(), world.rank).requires_grad_() for x in whole]
    want, out = case.whole(*whole), case.split(world, *mine)
    real = case.local(torch.arange(case.seq_len) < case.seq_len - case.padding, world.rank, dim=0)
    assert_equal_to(out[:, :, real], case.local(want, world.rank)[:, :, real], what=f"{case}: out")
    dy = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(case.seed))
    want_grads = torch.autograd.grad(want, whole, dy)
    grads = torch.autograd.grad(out, mine, case.local(dy, world.rank) * real[:, None])
    for name, got, exact in zip(("dq", "dk", "dv"), grads, want_grads):
        assert_equal_to(got, case.local(exact, world.rank), floor=1e-13, what=f"{case}: {name}")
