"""Sharded checkpoints: every rank writes what it holds, no tensor is gathered, and any other mesh can read them.

    FOLDER/step-00000010/rank-00000.safetensors ...   the parts, each stored by one of the ranks that hold it
    FOLDER/step-00000010/manifest.json                which part is where, and the checksums: see manifest.py

A part is described by its placement, so a reader with other placements copies from each stored part what overlaps its own.
The folder is written under a temporary name and renamed when everything is on disk, so a killed save leaves earlier
checkpoints intact.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import save_file

from minipar.comm import Comm
from minipar.comm.host import on_host
from minipar.comm.objects import all_gather_objects, gather_objects
from minipar.comm.transport.errors import PeerLost
from minipar.mesh import Placement
from minipar.support.atomic_files import write_whole
from minipar.support.errors import SaveError
from minipar.train.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    DescribedPart,
    block_of,
    by_tensor,
    checksum,
    checksum_of_part,
    key_of,
    read_manifest,
    with_digest,
)
from minipar.train.checkpoint.retention import OldCheckpoints
from minipar.train.checkpoint.tensor_file import DTYPES, TensorFile, raw_bytes

DEADLINE_S = 1800.0  # for a save, since disks are slower than networks and more often shared
STORABLE = frozenset(DTYPES.values())
LOOK_S = 0.05  # between two polls of a save that is waited for
PARTS = "parts"  # all ranks write their parts
COMMIT = "commit"  # rank 0 writes the manifest; then the checkpoint is there
REMOVAL = "removal"  # rank 0 removes old checkpoints
REPLACED = ".replaced.part"  # ends the temporary name of a checkpoint whose step is saved again


Numbers = dict[str, dict[str, float]]  # scalar state by parameter and key


class StoredPart(NamedTuple):
    """A local tensor to store: `kind` is "parameter", "buffer", or a key of the optimizer's state, such as "exp_avg"."""

    kind: str
    placement: Placement
    tensor: torch.Tensor


class Written(NamedTuple):
    """A rank's file in a checkpoint: its manifest entry, its parts' placements and checksums, and its scalars."""

    file: str
    entry: dict[str, Any]
    parts: list[DescribedPart]
    numbers: Numbers


class Saver:
    """Writes the checkpoints of one run in a background thread, one at a time, while training continues.

    comm      all ranks; the saver makes its own Comm of them
    keep      how many of the newest undamaged checkpoints to keep; 0: all
    wait      `save` returns only when the checkpoint is written, and so needs no copies
    resumed   the checkpoint that the run resumed from; it is never removed, and neither is the one just written
    deadline_s  how long a save may take, until the checkpoint is there

    `save` holds up the training loop while it all-gathers a digest per part and copies what this rank writes to the CPU;
    that copy is all the memory it takes. Then a thread on each rank writes the rank's file, and a thread on rank 0 adds the
    manifest, then removes old checkpoints; threads send nothing. Between steps, `poll` all-reduces their progress, 24
    bytes, until all are done. So a slow disk does not hold up training, and a rank that cannot write raises its own error,
    while the other ranks name it.
    All ranks must call `poll`, `save` and `finish`, which raise the error of a failed save: SaveError on the rank that
    failed, PeerLost on the other ranks; after `deadline_s`, TimeoutError on all ranks. If old checkpoints cannot be
    checked or removed, rank 0 only warns.
    """

    def __init__(
        self, comm: Comm, folder: Path, keep: int = 3, wait: bool = False, resumed: Path | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        self._comm = on_host(comm).subgroup(range(comm.size), "checkpoint")
        self._folder, self._wait, self._deadline_s = Path(folder), wait, deadline_s
        self._old = OldCheckpoints(self._folder, keep, resumed)
        # this rank's task of the save, kept until the tasks of all ranks have ended
        self._task: _Task | None = None
        self._stage: str  # of the save: PARTS, COMMIT or REMOVAL
        self._step: int
        self._started_s: float
        if comm.rank == 0:
            _end_replacements(self._folder)
            for unfinished in self._folder.glob(".step-*.part"):  # what a killed save has left
                shutil.rmtree(unfinished, ignore_errors=True)

    def save(
        self, step: int, parts: Iterable[StoredPart], extra: dict[str, Any], numbers: Numbers | None = None
    ) -> None:
        """Save the parts, and rank 0's `extra` (anything JSON can hold), as the state after `step` steps.

        numbers   this rank's scalar state, by parameter; the checkpoint has all ranks' in extra["numbers"]

        Raises ValueError for a part of a dtype that could not be read again.
        """
        self.finish()
        parts = list(parts)
        for kind, placement, tensor in parts:
            if tensor.dtype not in STORABLE:
                raise ValueError(
                    f"{kind} of {placement.name} is of {tensor.dtype}, which a checkpoint cannot hold"
                )
        mine, held = [], set()
        for kind, placement, tensor in _to_write(self._comm, parts):
            # Write a copy, since ranks go on computing, and a file may not have two tensors that share memory.
            own = tensor.detach().to("cpu", copy=not self._wait or tensor.data_ptr() in held)
            held.add(tensor.data_ptr())
            mine.append(StoredPart(kind, placement, own.contiguous()))
        self._step, self._started_s, self._extra, self._stage = step, time.monotonic(), extra, PARTS
        self._task = _Task(partial(_write_parts, self._beside, self._comm.rank, mine, numbers or {}))
        if self._wait:
            self.finish()

    def poll(self) -> None:
        """Check the save in progress, if any: add the manifest once all ranks have written; raise if a rank failed."""
        if self._task is None:
            return
        removing = self._stage == REMOVAL  # the checkpoint is there, so nothing is late and nothing fails
        late = not removing and time.monotonic() - self._started_s > self._deadline_s
        mine = (not self._task.done, not removing and self._task.error is not None, late)
        state = torch.tensor(mine, dtype=torch.int64, device=self._comm.device)
        working, failed, late = self._comm.all_reduce(state).tolist()  # numbers of ranks
        if failed or (working and late):
            self._fail(self._task)
        elif not working:
            self._task = self._task_after(self._task)

    def any_rank(self, what: bool) -> bool:
        """Return, on every rank, whether `what` is true on any of them."""
        return bool(self._comm.all_reduce(torch.tensor([int(what)], device=self._comm.device)).item())

    def finish(self) -> None:
        """Wait for the save in progress, if any. Raises the error that it raised."""
        while self._task is not None:
            self._task.wait(LOOK_S)
            self.poll()

    def _task_after(self, ended: _Task) -> _Task | None:
        """Start this rank's task of the save's next stage, now that all ranks' tasks have ended; None after the last."""
        if self._stage == PARTS:
            self._stage = COMMIT
            written = gather_objects(self._comm, ended.result)
            commit = partial(_commit, self._folder, self._beside, self._step, self._extra)
            return _Task(_nothing if written is None else partial(commit, written))
        if self._stage == COMMIT and self._old.keep:
            self._stage = REMOVAL
            remove = partial(self._old.remove_all_but, checkpoint_path(self._folder, self._step))
            return _Task(_nothing if self._comm.rank else remove)
        if ended.error is not None:
            why = f"{type(ended.error).__name__}: {ended.error}"
            warnings.warn(f"old checkpoints in {self._folder} could not be removed: {why}", stacklevel=3)
        return None

    @property
    def _beside(self) -> Path:
        final = checkpoint_path(self._folder, self._step)
        return final.with_name(f".{final.name}.part")

    def _fail(self, task: _Task) -> NoReturn:
        """Raise this rank's error, or PeerLost for another rank's; if no rank failed, TimeoutError for the deadline."""
        self._task = None
        mine = None if task.error is None else f"{type(task.error).__name__}: {task.error}"
        seen = all_gather_objects(self._comm, (mine, task.done))
        shutil.rmtree(self._beside, ignore_errors=True)  # on every rank: its folder may not be rank 0's
        self._comm.barrier()  # a rank that raises ends the others, so none does before what was written is removed
        failed = [rank for rank, (error, _) in enumerate(seen) if error is not None]
        what = f"the checkpoint after step {self._step} could not be written to {self._folder}"
        if not failed:
            slow = ", ".join(str(rank) for rank, (_, done) in enumerate(seen) if not done)
            raise TimeoutError(f"{what} in {self._deadline_s:g} s: rank {slow} is still writing")
        if task.error is not None:
            raise SaveError(f"{what}: rank {self._comm.rank}: {mine}") from task.error
        raise PeerLost(f"{what}: rank {failed[0]}: {seen[failed[0]][0]}")


class _Task:
    """A function run by a daemon thread. Once `done`, it has a `result` or an `error`. Process exit doesn't wait for it."""

    def __init__(self, function: Callable[[], Any]):
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self.result = function()
        except BaseException as error:
            self.error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


def _nothing() -> None:
    pass


def _to_write(comm: Comm, parts: list[StoredPart]) -> list[StoredPart]:
    """Choose the parts that this rank writes. One rank writes each replicated part, chosen by digest to share the load.

    All-gathers 8 bytes for each placement of each rank, and sorts them.
    """
    if comm.size == 1:
        return parts
    places = list({part.placement: None for part in parts})
    digests = [int(checksum(repr(place.part).encode())[:15], 16) for place in places]
    mine = torch.tensor(digests, dtype=torch.int64, device=comm.device)
    lengths = comm.all_gather(mine.new_tensor([len(mine)]), algorithm="ring").tolist()
    everywhere = comm.all_gather(mine, sizes=lengths).cpu()
    ranks = torch.arange(comm.size).repeat_interleave(torch.tensor(lengths))
    ordered, order = everywhere.sort(stable=True)  # among equal digests, the lower rank's comes first
    first = torch.searchsorted(ordered, mine.cpu())
    count = torch.searchsorted(ordered, mine.cpu(), right=True) - first
    writer = ranks[order[first + mine.cpu() % count]].tolist()
    owned = {place for place, rank in zip(places, writer) if rank == comm.rank}
    return [part for part in parts if part.placement in owned]


def _write_parts(beside: Path, rank: int, parts: list[StoredPart], numbers: Numbers) -> Written:
    """Write this rank's file, and describe it."""
    beside.mkdir(parents=True, exist_ok=True)
    file = beside / f"rank-{rank:05}.safetensors"
    tensors = {key_of(part.kind, part.placement.name): part.tensor for part in parts}
    assert len(tensors) == len(parts), "a rank holds two parts of one tensor"
    save_file(tensors, file)
    _flush(file)
    described: dict[Placement, dict[str, str]] = {}
    for part in parts:
        digests = described.setdefault(part.placement, {})
        digests[part.kind] = checksum_of_part([raw_bytes(part.tensor)])
    entry = {"bytes": file.stat().st_size, "header": checksum(TensorFile(file).header_bytes)}
    names = {place.name for place in described}
    places = [((p.name, p.global_shape, block_of(p), p.flat), kinds) for p, kinds in described.items()]
    return Written(file.name, entry, places, {name: own for name, own in numbers.items() if name in names})


def _commit(folder: Path, beside: Path, step: int, extra: dict[str, Any], written: list[Written]) -> None:
    """Add the manifest and give the folder its final name, which makes it a checkpoint."""
    numbers = {name: own for rank in written for name, own in rank.numbers.items()}
    if numbers:
        extra = {**extra, "numbers": {**extra.get("numbers", {}), **numbers}}
    files = {rank.file: rank.entry for rank in written}
    _require_files(beside, files)
    manifest = {
        "format": FORMAT,
        "step": step,
        "extra": extra,
        "files": files,
        "tensors": by_tensor([rank.parts for rank in written]),
    }
    write_whole(beside / MANIFEST, with_digest(manifest))
    final = checkpoint_path(folder, step)
    replaced = final.with_name(f".{final.name}{REPLACED}")
    if final.exists():
        os.replace(final, replaced)
    os.replace(beside, final)
    _flush(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _end_replacements(folder: Path) -> None:
    """Give a checkpoint its name where a save was killed after it had renamed the one it replaces.

    The new checkpoint is complete at that moment, and gets the name; if its files are not all there, the old one gets it.
    """
    for replaced in folder.glob(f".step-*{REPLACED}"):
        final = folder / replaced.name[1 : -len(REPLACED)]
        new = final.with_name(f".{final.name}.part")
        if final.exists():
            continue
        try:
            _require_files(new, read_manifest(new)[0]["files"])
        except (OSError, ValueError, KeyError, TypeError):
            os.replace(replaced, final)
        else:
            os.replace(new, final)
        _flush(folder)


def _require_files(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raise OSError, naming the file, unless this rank sees all files in the folder, each with all of its bytes."""
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{name} was written, and rank 0 does not find it; the folder must be one that all ranks share"
            ) from None
        if size != entry["bytes"]:
            raise OSError(f"{name} has {size} bytes on rank 0, and {entry['bytes']} were written")


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def _flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, from the operating system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
