"""Start ranks: `run` calls a function in each of several new processes, or in those that torchrun has started.

    results = run(fn, 4)      fn(world) on four ranks; `world` is a rank's Comm of all four
    torchrun --nproc-per-node 4 script.py         the same script, in which run(fn, 4) then starts nothing

    caller --- starts, waits for ---> rank 0, rank 1, ...        they meet through a file, and are connected by gloo
           <--- a file each: the result, or the traceback ---

If a rank raises, all ranks end, and its traceback is shown. They also end if a rank dies, or at Ctrl-C: no process is left.

In the library: minipar.run, which keeps its processes for the next call, takes a notebook's functions, finds deadlocks; and
minipar.init_from_env, for torchrun.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from .comm import Comm


def run(fn, size, *args, timeout_s=60.0):
    """Call fn(world, *args) on `size` ranks, each a process of its own; return their results, in rank order.

    fn and args are pickled, so fn must be defined in a file. The first rank that raises ends the other ranks; its traceback
    is in the RuntimeError. Under torchrun each process is a rank already, and the list has this rank's result alone.
    """
    if size < 1:
        raise ValueError(f"size={size} ranks; use 1 or more")
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        if dist.get_world_size() != size:
            raise ValueError(f"torchrun started {dist.get_world_size()} ranks; {size} are needed")
        return [fn(Comm(range(size)), *args)]
    context = multiprocessing.get_context("forkserver")
    # Imported once, not once for each rank; torch.optim imports torch._dynamo when it is first used.
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    with TemporaryDirectory() as folder:
        arguments = (size, folder, timeout_s, context.Barrier(size), fn, args)
        ranks = [context.Process(target=_rank, args=(r, *arguments), daemon=True) for r in range(size)]
        try:
            for process in ranks:
                process.start()
            running = {process.sentinel: process for process in ranks}
            while running:
                for sentinel in connection.wait(list(running)):
                    process = running.pop(sentinel)
                    process.join()
                    if process.exitcode != 0:
                        raise RuntimeError(cause(ranks, Path(folder, "error")))
        finally:  # also after Ctrl-C: nothing is left running
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [torch.load(Path(folder, f"result{r}"), weights_only=False) for r in range(size)]


def cause(ranks, error):
    """Say which rank failed first: a rank that died, which made the other ranks raise, or the first rank that raised."""
    for rank, process in enumerate(ranks):
        process.join(0.1)
        if process.exitcode not in (None, 0, 1):
            return f"rank {rank} died, exit code {process.exitcode}"
    return error.read_text() if error.exists() else "a rank ended with exit code 1"


def _rank(rank, size, folder, timeout_s, all_are_done, fn, args):
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the process that called `run`; it ends the ranks
    caller = multiprocessing.parent_process()
    threading.Thread(target=lambda: (caller.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{folder}/store", timedelta(seconds=timeout_s), rank=rank, world_size=size
        )
        result = fn(Comm(range(size)), *args)
        torch.save(result, Path(folder, f"result{rank}"))
        all_are_done.wait()  # a process that ends closes its connections, which may still carry its messages
    except Exception:
        # When this rank's connections close, the other ranks raise too: the first rank to write this file is the cause.
        with suppress(FileExistsError), open(Path(folder, "error"), "x") as file:
            file.write(f"rank {rank} raised:\n{traceback.format_exc()}")
        os._exit(1)
