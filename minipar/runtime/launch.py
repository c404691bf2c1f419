"""Start ranks: `run` calls a function on every rank of a pool of local processes; `init_from_env` joins torchrun's.

The pool persists: starting processes and importing torch takes seconds, a call on a running pool milliseconds. A pool of
eight also runs smaller worlds, on its first ranks. After a failure every process is replaced, because a message under
way, or a connection closed by a timeout, would spoil the next run.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from numbers import Integral, Real
from uuid import uuid4

import torch.distributed as dist

from minipar.comm.communicator import Comm
from minipar.comm.transports import choose_transport
from minipar.runtime.devices import Machine, choose_backend, device_of, group_options
from minipar.runtime.environment import MAX_RANKS, in_local_pool, local_rank, ranks_per_node
from minipar.runtime.forkserver import ForkServer
from minipar.runtime.pool import Pool
from minipar.runtime.serialization import dumps

MAX_TIMEOUT_S = 366 * 24 * 3600  # clocks count nanoseconds in 64 bits


def run(
    fn: Callable, *args, world_size: int, backend: str | None = None, timeout_s: float = 60.0, on_report=None
) -> list:
    """Call `fn(world, *args)` on every rank of a local pool; return the results in rank order. `world` is a Comm.

    world_size  the number of ranks
    backend     None or "gloo": tensors on the CPU. "nccl": on GPUs. "auto": nccl where it can serve every rank
    timeout_s   how long one send, receive or collective may wait; the run itself is not bounded
    on_report   called in this process as on_report(rank, value) for every `world.report(value)` on a rank

    fn may be a closure or a notebook's function: it is sent by value. Tensors travel to the CPU, in both directions: fn
    moves its own by x.to(world.device). What ranks print appears here with their rank.
    Raises ValueError for a bad argument or during another run, RankError where a rank raised, died, waited too long,
    is part of a deadlock, or left a send or a receive without its counterpart. The next run then starts new processes.
    """
    backend, world_size = _check_request(fn, world_size, backend, timeout_s), int(world_size)
    payload, turn = _packed(fn, args), object()
    try:
        if _turns.setdefault("run", turn) is not turn:
            raise ValueError(
                "run was called while another one is under way; call it again when that one has returned"
            )
        return _pool_of(world_size, backend).run(payload, world_size, float(timeout_s), on_report)
    except BaseException:
        if _turns.get("run") is turn and backend in _pools:
            _pools.pop(backend).close()
        raise
    finally:
        if _turns.get("run") is turn:
            del _turns["run"]


def _pool_of(world_size: int, backend: str) -> Pool:
    """Return a pool of at least this size; start one where there is none, or a process of it has ended."""
    pool = _pools.get(backend)
    if pool is None or pool.size < world_size or not pool.alive():
        if pool is not None:
            _pools.pop(backend).close()
        if _servers and not _servers[0].alive():
            _servers.pop().close()
        if not _servers:
            _servers.append(ForkServer())
        pool = _pools[backend] = Pool(_servers[0], world_size, backend)
    return pool


def shutdown() -> None:
    """End every process of every pool. The process that starts them stays, for the next run; it ends with this one."""
    while _pools:
        _pools.popitem()[1].close()


def _end_all() -> None:
    """End every process; in a forked child, which has copies of the connections, only let go of its parent's."""
    shutdown()
    while _servers:
        _servers.pop().close()
    _turns.clear()


def init_from_env(backend: str | None = None, timeout_s: float = 600.0) -> Comm:
    """Return the world of a program started by torchrun: `torchrun --nproc-per-node 4 script.py`.

    backend  "gloo", "nccl", or None, as "auto": nccl, on this rank's GPU, where it can serve every local rank

    Reads the rank, the world size and the rendezvous address from the environment that torchrun sets.
    Raises ValueError where one is missing, for a bad `timeout_s`, and where NCCL cannot serve the ranks of this machine.
    """
    _check_timeout(timeout_s)
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: start the program with torchrun, or use minipar.run")
    local_size, machine = ranks_per_node(), Machine.here()
    backend = choose_backend(backend or "auto", local_size, machine)
    device = device_of(backend, local_rank(), machine)
    if not dist.is_initialized():
        store, rank, size = next(dist.rendezvous("env://"))
        store, options = _of_this_life(store, rank, size), group_options(backend, device)
        dist.init_process_group(store=store, rank=rank, world_size=size, **options)
        atexit.register(_leave_group)
    return Comm.from_process_group(timeout_s=timeout_s, node_size=local_size)


def _leave_group() -> None:
    """Destroy the process group, which the Comms have released by now (`Transport.release_groups`).

    After an uncaught exception, destroying it would wait for messages that may never come: NCCL's is aborted.
    """
    if not dist.is_initialized():
        return
    if getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
    elif "nccl" in dist.get_backend():
        dist.distributed_c10d._abort_process_group()


def _of_this_life(store: dist.Store, rank: int, size: int) -> dist.Store:
    """Return a part of the store, under a prefix that no ranks before a restart have used.

    torchrun keeps its store when it restarts the ranks. The new ranks would find the addresses of the dead ones, and
    wait for them (pytorch issue 135712). torchrun's restart count does not help, because each machine counts its own.
    So every other rank stores a new random word, and rank 0 answers each word it finds with its own, the prefix. An
    answer to a new word can only come from the present rank 0.
    """
    word = uuid4().hex
    if rank:
        store.set(f"minipar/{rank}", word)
        life = store.get(f"minipar/{word}").decode()
        store.set(f"minipar/{life}/{rank}", "heard")
        return dist.PrefixStore(life, store)
    missing, deadline = set(range(1, size)), time.monotonic() + store.timeout.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"minipar/{other}"]):
                store.set(f"minipar/{store.get(f'minipar/{other}').decode()}", word)
        missing = {other for other in missing if not store.check([f"minipar/{word}/{other}"])}
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} have not joined the world of {size}")
        time.sleep(0.005)
    return dist.PrefixStore(word, store)


def _check_request(fn, world_size, backend, timeout_s) -> str:
    if not callable(fn):
        raise ValueError(f"fn={fn!r} cannot be called; give a function of (world, *args)")
    if not _is_number(world_size, Integral) or not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size={world_size!r} is not a number of local ranks; use 1 to {MAX_RANKS}")
    _check_timeout(timeout_s)
    if sys.platform == "win32":
        raise ValueError("run starts no ranks on Windows; use the Windows Subsystem for Linux")
    if in_local_pool():
        raise ValueError("run was called on a rank; a rank talks to the others through its Comm")
    # What `fn` brings along is on the CPU, unless the caller says otherwise.
    backend = choose_backend("gloo" if backend is None else backend, world_size, Machine.here())
    choose_transport(backend)  # here too, so that a bad choice starts no process
    return backend


def _check_timeout(timeout_s) -> None:
    if not _is_number(timeout_s, Real) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s={timeout_s!r} is not a number of seconds above 0 and at most {MAX_TIMEOUT_S} (a year)"
        )


def _is_number(value, kind) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _packed(fn, args) -> bytes:
    try:
        return dumps((fn, args))
    except Exception as error:
        raise ValueError(f"{fn!r} and its arguments cannot travel to another process: {error}") from error


# What outlives a call: the pools by backend, the process that starts their ranks, and whose turn it is to run.
_pools: dict[str, Pool] = {}
_servers: list[ForkServer] = []
_turns: dict[str, object] = {}
atexit.register(_end_all)
if hasattr(os, "register_at_fork"):  # not on Windows, where run refuses
    os.register_at_fork(after_in_child=_end_all)
