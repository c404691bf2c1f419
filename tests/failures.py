"""Functions that fail on two ranks, each in its own way. Ranks import this file: it is light, and a user's own module.

Where the other rank's wait is looked at, the failure waits for it.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time

import torch

THREE = torch.ones(3)


def _receive(world, source, length=3):
    return world.recv((length,), torch.float32, source)


def _once_rank_0_receives(world):
    """Return on rank 1 when rank 0's main thread waits to receive 12 bytes, and on rank 0 at once.

    The signal has a handler, not a mask: it may come early, to any thread that does not mask it, and end the process.
    """
    told = threading.Event()
    before = signal.signal(signal.SIGUSR2, lambda *_: told.set())
    other = world.all_gather(torch.tensor([os.getpid()]))[1].item()
    if world.rank == 1:
        while not told.wait(0.1):  # a signal just before a wait without a limit would not end it
            pass
        signal.signal(signal.SIGUSR2, before)
        return

    def tell():
        waits, main = world._transport.waits, threading.main_thread().ident
        while "receive 12 bytes" not in str(waits.get(main)):
            time.sleep(0.001)
        os.kill(other, signal.SIGUSR2)

    threading.Thread(target=tell, daemon=True).start()


def raises(world):
    _once_rank_0_receives(world)
    if world.rank == 1:
        raise KeyError("no such weight")
    _receive(world, 1)


def raises_on_every_rank(world):
    raise KeyError(f"rank {world.rank} in vain")


def is_killed(world):
    _once_rank_0_receives(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _receive(world, 1)


def exits_at_once(world):
    _once_rank_0_receives(world)
    if world.rank == 1:
        os._exit(3)
    _receive(world, 1)


def asks_to_exit(world):
    _once_rank_0_receives(world)
    if world.rank == 1:
        sys.exit("enough")
    _receive(world, 1)


def keeps_another_waiting(world):
    if world.rank == 1:
        threading.Event().wait(60)
    _receive(world, 1)


def sleeps(world):
    if world.rank == 1:
        threading.Event().wait(60)
    world.barrier()


def spins(world):
    if world.rank == 1:
        while True:
            pass
    world.barrier()


def spins_in_native_code(world):
    if world.rank == 1:
        sum(itertools.repeat(1))
    world.barrier()


def is_stopped(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.barrier()


def is_stopped_and_lost(world):
    """Rank 1 stops; rank 0 waits past its deadline, which closes the pair of sockets, and fails at the next message."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with contextlib.suppress(TimeoutError):
        _receive(world, 1)
    _receive(world, 1)


def sleeps_through_a_native_collective(world):
    if world.rank == 1:
        threading.Event().wait(60)
    world.all_reduce(THREE, algorithm="native")


def both_receive_first(world):
    _receive(world, 1 - world.rank)
    world.send(THREE, 1 - world.rank)


def both_send_first(world):
    world.send(torch.ones(1 << 20), 1 - world.rank)
    _receive(world, 1 - world.rank, 1 << 20)


def receives_from_one_that_has_returned(world):
    if world.rank == 0:
        _receive(world, 1)


def sends_to_one_that_has_returned(world):
    if world.rank == 0:
        world.send(THREE, 1)


def receives_another_size(world):
    if world.rank == 0:
        world.send(THREE, 1)
    else:
        _receive(world, 0, length=5)


def leaves_a_message(world):
    if world.rank == 0:
        world.send(THREE, 1, async_op=True)


def leaves_a_receive(world):
    if world.rank == 0:
        world.recv((3,), torch.float32, 1, async_op=True)


def skips_a_collective(world):
    if world.rank == 0:
        world.all_reduce(THREE)


def skips_a_native_collective(world):
    if world.rank == 0:
        world.all_reduce(THREE, algorithm="native")


def returns_what_cannot_travel(world):
    return threading.Lock() if world.rank == 1 else None
