"""Start ranks: `run` calls a function on every rank of a pool of local processes; `init_from_env` joins torchrun's world.

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
from datetime import timedelta
from numbers import Integral, Real
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from minipar.comm.communicator import Comm
from minipar.comm.transport.transports import choose_transport
from minipar.runtime.call import OnAsk, OnReport
from minipar.runtime.caller import CallerEnvironment
from minipar.runtime.devices import Machine, choose_backend, device_of, group_options
from minipar.runtime.forkserver import ForkServer
from minipar.runtime.pool import Pool
from minipar.runtime.serialization import dumps
from minipar.support.environment import MAX_RANKS, in_local_pool, local_rank, ranks_per_node, under_torchrun

MAX_TIMEOUT_S = 366 * 24 * 3600  # a year: a timeout of centuries, in nanoseconds, would overflow 64 bits


def run(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int,
    backend: str | None = None,
    timeout_s: float = 60.0,
    on_report: OnReport | None = None,
    on_ask: OnAsk | None = None,
) -> list[Any]:
    """Call `fn(world, *args)` on every rank of a local pool; return the results in rank order. `world` is a Comm.

    world_size  the number of ranks
    backend     None or "gloo": tensors are on the CPU. "nccl": they are on GPUs. "auto": nccl if it can serve every rank
    timeout_s   how long one send, receive or collective may wait; the run itself is not bounded
    on_report   called in this process as on_report(rank, value) for every `world.report(value)` on a rank
    on_ask      called in this process as on_ask(rank, value) for every `world.ask(value)` on a rank, which gets its answer

    fn may be a closure or a notebook's function, because it is sent by value. Tensors arrive on the CPU in both directions;
    fn moves its tensors by x.to(world.device). The ranks' output appears here with their rank.
    Raises ValueError for a bad argument or during another run. Raises RankError if a rank raised, died, waited too long, is
    part of a deadlock, or left a send or a receive without its counterpart; the next run then starts new processes.
    """
    backend = _check_request(fn, world_size, backend, timeout_s)
    world_size = int(world_size)
    payload, environment = _packed(fn, args), CallerEnvironment.here()
    turn = object()
    try:
        if _turns.setdefault("run", turn) is not turn:
            raise ValueError(
                "run was called while another one is under way; call it again when that one has returned"
            )
        pool = _pool_of(world_size, backend)
        return pool.run(payload, environment, world_size, float(timeout_s), on_report, on_ask)
    except BaseException:
        if _turns.get("run") is turn and backend in _pools:
            _pools.pop(backend).close()
        raise
    finally:
        if _turns.get("run") is turn:
            del _turns["run"]


def _pool_of(world_size: int, backend: str) -> Pool:
    """Return a pool of at least this size; start a new pool if there is none, or if one of its processes has ended."""
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
    """End every process; in a forked child, only close its copies of the parent's connections."""
    shutdown()
    while _servers:
        _servers.pop().close()
    _turns.clear()


def init_from_env(backend: str | None = None, timeout_s: float = 600.0) -> Comm:
    """Return the world of a program started by torchrun: `torchrun --nproc-per-node 4 script.py`.

    backend  "gloo" or "nccl"; None or "auto": nccl, on this rank's GPU, if it can serve every local rank

    Reads the rank, the world size and the rendezvous address from the environment that torchrun sets.
    Raises ValueError if one is missing, for a bad `timeout_s`, or if NCCL cannot serve the ranks of this machine.
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
        store, rank, size = next(rendezvous("env://"))
        store = _of_this_life(store, rank, size)
        dist.init_process_group(store=store, rank=rank, world_size=size, **group_options(backend, device))
        atexit.register(_leave_group)
    return Comm.from_process_group(timeout_s=timeout_s, node_size=local_size)


def surrounding_world(backend: str | None = None, timeout_s: float = 600.0) -> Comm | None:
    """Return the world of the caller's default process group, or of torchrun's ranks; None if there is neither."""
    if in_local_pool():
        return None
    if dist.is_available() and dist.is_initialized():
        return Comm.from_process_group(timeout_s=timeout_s)
    return init_from_env(backend, timeout_s) if under_torchrun() else None


def _leave_group() -> None:
    """Destroy the process group, which the Comms have released by now (`Transport.release_groups`).

    After an uncaught exception, destroying NCCL's group would wait for messages that may never come: abort it instead.
    """
    if not dist.is_initialized():
        return
    if getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
    elif "nccl" in dist.get_backend():
        dist.distributed_c10d._abort_process_group()


def _of_this_life(store: Store, rank: int, size: int) -> Store:
    """Return a part of the store, under a prefix that no ranks before a restart have used.

    torchrun keeps its store when it restarts the ranks. The new ranks would find the addresses of the dead ones, and
    wait for them (pytorch issue 135712). torchrun's restart count does not help, because each machine counts its own.
    So every other rank stores a new random word. Rank 0 answers each word that it finds with a word of its own, and rank
    0's word becomes the prefix. An answer to a new word can only come from the present rank 0.
    """
    word = uuid4().hex
    if rank:
        store.set(f"minipar/{rank}", word)
        life = store.get(f"minipar/{word}").decode()
        store.set(f"minipar/{life}/{rank}", "heard")
        return PrefixStore(life, store)
    missing = set(range(1, size))
    limit: timedelta = store.timeout  # type: ignore[attr-defined]
    deadline = time.monotonic() + limit.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"minipar/{other}"]):
                store.set(f"minipar/{store.get(f'minipar/{other}').decode()}", word)
        missing = {other for other in missing if not store.check([f"minipar/{word}/{other}"])}
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} have not joined the world of {size}")
        time.sleep(0.005)
    return PrefixStore(word, store)


def _check_request(fn: object, world_size: Any, backend: str | None, timeout_s: object) -> str:
    if not callable(fn):
        raise ValueError(f"fn={fn!r} cannot be called; give a function of (world, *args)")
    if not _is_number(world_size, Integral) or not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size={world_size!r} is not a number of local ranks; use 1 to {MAX_RANKS}")
    _check_timeout(timeout_s)
    if sys.platform == "win32":
        raise ValueError("run starts no ranks on Windows; use the Windows Subsystem for Linux")
    if in_local_pool():
        raise ValueError("run was called on a rank; a rank talks to the others through its Comm")
    # Without a backend's name ranks are on the CPU, where the tensors captured by `fn` are, too.
    backend = choose_backend("gloo" if backend is None else backend, world_size, Machine.here())
    choose_transport(backend)  # checked here too, so that a bad choice starts no process
    return backend


def _check_timeout(timeout_s: Any) -> None:
    if not _is_number(timeout_s, Real) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s={timeout_s!r} is not a number of seconds above 0 and at most {MAX_TIMEOUT_S} (a year)"
        )


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _packed(fn: object, args: tuple[Any, ...]) -> bytes:
    try:
        return dumps((fn, args))
    except Exception as error:
        raise ValueError(f"{fn!r} and its arguments cannot travel to another process: {error}") from error


# State that outlives a call: the pools by backend, the process that starts their ranks, and whose turn it is to run.
_pools: dict[str, Pool] = {}
_servers: list[ForkServer] = []
_turns: dict[str, object] = {}
atexit.register(_end_all)
if hasattr(os, "register_at_fork"):  # not on Windows, where run refuses
    os.register_at_fork(after_in_child=_end_all)
