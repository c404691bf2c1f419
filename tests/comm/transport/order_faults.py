"""Programs that break one of NCCL's rules, each in its own way. Most of them run on the tagged transport.

Ranks import this file: it is light, and a user's own module.
"""

import threading

import torch

THREE = torch.ones(3)


def makes_groups_in_another_order(world):
    for name in ("a", "b") if world.rank == 0 else ("b", "a"):
        world.subgroup([0, 1], name)


def makes_groups_of_other_ranks_first(world):
    """Ranks 0 and 1 agree on each other's groups, and rank 2 with both; but each waits for the next one."""
    pairs = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}
    for pair in pairs[world.rank]:
        world.subgroup(pair, "pair")


def forgets_to_make_a_group(world):
    if world.rank == 0:
        world.subgroup([0, 1], "a")
    world.barrier()


def makes_a_group_in_a_thread(world):
    def work():
        try:
            world.subgroup([0, 1], "late")
        except RuntimeError as error:
            said.append(error)

    said = []
    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()
    raise said[0]


def makes_a_group_inside_an_operation(world):
    world.custom("grouping", lambda: world.subgroup([0, 1], "late"), async_op=True).wait()


def swaps_collectives(world):
    collectives = [world.all_reduce, world.all_gather]
    for collective in collectives if world.rank == 0 else collectives[::-1]:
        collective(THREE)


def swaps_sums_of_one_length(world):
    shapes = [(2, 3), (3, 2)]
    for shape in shapes if world.rank == 0 else shapes[::-1]:
        world.all_reduce(torch.ones(shape))


def swaps_a_message_and_a_collective(world):
    if world.rank == 0:
        handle = world.send(THREE, 1, async_op=True)
        world.all_reduce(THREE)
        handle.wait()
    else:
        world.all_reduce(THREE)
        world.recv((3,), torch.float32, 0)


def has_a_hook_that_communicates_in_another_order(world):
    """A hook sums each weight's gradient when it is ready: the order is that of the backward, another one on rank 1."""

    def add_up(weight):
        world.all_reduce_(weight.grad)

    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(4, requires_grad=True)
    for weight in (a, b):
        weight.register_post_accumulate_grad_hook(add_up)
    x, y = (a, b) if world.rank == 0 else (b, a)
    (x.square().sum() + y.square().sum()).backward()


def adds_here_and_takes_the_largest_there(world):
    world.all_reduce(THREE, "sum" if world.rank else "max")


def skips_a_collective(world):
    if world.rank == 0:
        world.all_reduce(THREE)


def calls_a_collective_twice(world):
    for _ in range(1 + world.rank):
        world.all_reduce(THREE)
    world.barrier()


def forgets_the_partner_of_a_send(world):
    if world.rank == 0:
        world.send(THREE, 1)


def leaves_a_send_behind(world):
    if world.rank == 0:
        world.send(THREE, 1, async_op=True)


def sends_nothing_to_one_that_waits(world):
    if world.rank == 0:
        world.send(THREE[:0], 1)
    else:
        world.recv((3,), torch.float32, 0)


def posts_an_empty_message(world):
    """As a transport would that does not leave out empty tensors."""
    transport, channel, empty = world._transport, world._channel, torch.empty(0)
    if world.rank == 0:
        transport.start(channel, (empty, 1), None, False)
    else:
        transport.start(channel, None, (empty, 0), False)


def sends_fewer_than_are_received(world):
    if world.rank == 0:
        world.send(THREE, 1)
    else:
        world.recv((4,), torch.float32, 0)


def receives_another_dtype(world):
    if world.rank == 0:
        world.send(THREE.double()[:1], 1)
    else:
        world.recv((1,), torch.int64, 0)


def sums_another_dtype(world):
    world.all_reduce(THREE if world.rank == 0 else THREE.int())


def sends_first_on_both(world):
    handle = world.send(THREE, 1 - world.rank, async_op=True)
    world.recv((3,), torch.float32, 1 - world.rank)
    handle.wait()


def crosses_torchs_own_collectives(world):
    if world.rank == 0:
        world.all_reduce(THREE, algorithm="native")
    else:
        world.broadcast(THREE, algorithm="native")


def uses_a_second_thread(world):
    world.barrier()
    raise _in_a_thread(lambda: world.all_reduce(THREE))


def runs_a_backward_in_a_second_thread(world):
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: world.all_reduce(g))
    world.barrier()
    raise _in_a_thread(x.sum().backward)


def _in_a_thread(work):
    """What `work` raises in a second thread."""
    said = []

    def run():
        try:
            work()
        except RuntimeError as error:
            said.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return said[0] if said else AssertionError("a second thread was let through")
