"""A recomputation that sends nothing: the bytes of a step without recomputation, and the numbers of one process."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import minipar
from minipar.comm import autograd
from minipar.comm.repeated import Kept, without_messages
from minipar.config.train_config import VERIFY_DEFAULTS
from minipar.mesh import Mesh
from minipar.support.live_bytes import LiveBytes
from minipar.train.parallelize import parallelize
from minipar.train.verification.verify import table, verify
from tests.cost.runs import MIXTURE, RUN, sent

MESHES = [
    dict(tp=2),
    dict(tp=2, sequence_parallel=True),
    dict(dp=2, ep=2, tp=2, model=MIXTURE, sequence_parallel=True),
    dict(cp=2, cp_attention="ulysses"),
]


def named(mesh) -> str:
    return str({k: v for k, v in mesh.items() if k != "model"})


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", ["full", "every:2"])
@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_recomputed_blocks_send_no_more_than_blocks_that_are_not(mesh, mode):
    config = replace(RUN, **mesh)
    plain, again, kept = (
        [of_rank[1] for of_rank in minipar.run(sent, replace(config, **how), world_size=config.world_size)]
        for how in (dict(), dict(recompute=mode), dict(recompute=mode, keep_messages=True))
    )
    assert kept == plain
    assert all(sum(more.values()) > sum(least.values()) for more, least in zip(again, plain))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_numbers_are_those_of_one_process(mesh):
    changed = {**mesh, "model": replace(VERIFY_DEFAULTS.model, num_experts=4 if "ep" in mesh else 0)}
    result = verify(replace(VERIFY_DEFAULTS, recompute="full", keep_messages=True, steps=2, **changed))
    assert result.equal, table(result)


def bytes_after_a_forward(world, config):
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    tokens = torch.zeros(2, config.seq_len, dtype=torch.int64)
    with LiveBytes() as memory:
        loss = state.stages[0].loss(tokens, tokens)
        held = memory.now
    assert loss.requires_grad
    return held


def test_a_layer_keeps_two_sums_of_hidden_states_more():
    """With tp: the all-reduced outputs of attention and MLP, 2 B T D elements a layer."""
    config = replace(RUN, tp=2, recompute="full")
    less, more = (
        minipar.run(bytes_after_a_forward, replace(config, keep_messages=keeps), world_size=2)
        for keeps in (False, True)
    )
    layer = 2 * 2 * config.seq_len * config.model.dim * 8
    assert [b - a for a, b in zip(less, more)] == [config.model.num_layers * layer] * 2


def summed_twice(world, write=False):
    """The gradient of x through two sums over ranks in a checkpoint, the backward's messages, and what is left kept."""
    x = torch.full((3,), 1.0 + world.rank, requires_grad=True)

    def forward(x):
        y = autograd.all_reduce(world, x)
        if write:
            y.add_(1)
        return (y * autograd.all_reduce(world, x * x)).sum()

    loss = checkpoint(forward, x, use_reentrant=False, context_fn=lambda: without_messages([world]))
    world.traffic.reset()
    loss.backward()
    return x.grad.tolist(), world.traffic.messages, world.kept


def gradient(x: float) -> list[float]:
    return [5.0 + 3.0 * 2 * x] * 3


def test_results_come_back_in_the_order_of_the_calls():
    for rank, (grad, messages, kept) in enumerate(minipar.run(summed_twice, world_size=2)):
        assert (grad, messages, kept) == (gradient(1.0 + rank), 0, None)


def last_first(world):
    collective = Kept.collective

    def fault(self, run, async_op):
        return self.results.pop().value() if self.repeats else collective(self, run, async_op)

    with patch.object(Kept, "collective", fault):
        return summed_twice(world)


def test_a_planted_fault_changes_the_gradient():
    for rank, (grad, *_) in enumerate(minipar.run(last_first, world_size=2)):
        assert grad != gradient(1.0 + rank)


def test_overwriting_a_collectives_result_is_an_error():
    with pytest.raises(minipar.RankError, match="a forward wrote to what a collective had returned"):
        minipar.run(summed_twice, True, world_size=2)


def kept_in_a_forward(world, collective, waits):
    """The gradient through a collective in a forward that is repeated, whose handle is waited for so many times."""
    x = torch.tensor([1.0 + world.rank], requires_grad=True)

    def forward(x):
        handle = collective(world, x.detach())
        values = [handle.wait() for _ in range(waits)]
        return (x * x * (values[-1] if values else 1.0)).sum()

    checkpoint(forward, x, use_reentrant=False, context_fn=lambda: without_messages([world])).backward()
    return x.grad.item()


def summed_later(world, x):
    return world.all_reduce(x, async_op=True)


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_handle_may_be_waited_for_as_often_as_one_likes(waits):
    total = 3.0 if waits else 1.0
    found = minipar.run(kept_in_a_forward, summed_later, waits, world_size=2)
    assert found == [2 * (1.0 + rank) * total for rank in range(2)]


def gathered_into(world, x):
    return world.all_gather(x, out=torch.zeros(2), async_op=True)


def summed_in_place(world, x):
    return world.all_reduce_(x.clone(), async_op=True)


@pytest.mark.parametrize("collective", [gathered_into, summed_in_place])
def test_a_result_that_would_be_written_elsewhere_is_refused(collective):
    """The repetition would return it, and leave the caller's memory as it is."""
    with pytest.raises(minipar.RankError, match="into `out`, in a forward that is repeated without messages"):
        minipar.run(kept_in_a_forward, collective, 1, world_size=2)


def left_by_a_forward_alone(world):
    """Bytes that a checkpointed forward leaves where its result is dropped and no backward follows."""
    x = torch.ones(3, requires_grad=True)

    def forward(x):
        return (autograd.all_reduce(world, x) * autograd.all_reduce(world, x * x)).sum()

    forward(x)  # from the first sum on, the Comm has scratch memory
    with LiveBytes() as memory:
        checkpoint(forward, x, use_reentrant=False, context_fn=lambda: without_messages([world]))
        return memory.now


def test_a_forward_without_a_backward_leaves_nothing():
    """What is kept does not hold the graph that holds it."""
    assert minipar.run(left_by_a_forward_alone, world_size=2) == [0, 0]


def test_without_recomputation_it_is_refused():
    with pytest.raises(ValueError, match="recompute=none recomputes none"):
        replace(VERIFY_DEFAULTS, tp=2, keep_messages=True)
