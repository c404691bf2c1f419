"""Sharded checkpoints: every rank writes what it holds, no tensor is gathered, and any other mesh can read them.

    FOLDER/step-00000010/rank-00000.safetensors ...   the parts, each stored by one of the ranks that hold it
    FOLDER/step-00000010/manifest.json                the kind and placement of each part; the files' sizes and checksums

A part is described by its placement, so a reader with other placements copies from each stored part what overlaps its
own. The folder is written under a temporary name and renamed when all of it is on the disk, so a killed save leaves
earlier checkpoints intact.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from minipar.comm.objects import gather_objects
from minipar.mesh import Placement
from minipar.train.atomic_files import write_whole
from minipar.train.restore import FORMAT, MANIFEST, checkpoints, checksum


class StoredPart(NamedTuple):
    """A local tensor to store: `kind` is "parameter", "buffer", or a key of the optimizer's state, such as "exp_avg"."""

    kind: str
    placement: Placement
    tensor: torch.Tensor


class Saver:
    """Writes the checkpoints of one run in a background thread, one at a time, while training continues.

    comm      all ranks; subgroups of it, for planning and for the writing threads, are made here
    keep      how many of the newest checkpoints to keep; 0: all
    wait      `save` returns only when the checkpoint is written

    `save` holds up the training loop while it all-gathers a digest per part and copies what this rank writes to the
    CPU; a thread then writes it. At most one save is in progress: the next `save` first waits for it.
    """

    def __init__(self, comm, folder: Path, keep: int = 3, wait: bool = False):
        self._comm = comm.subgroup(range(comm.size), "checkpoint")
        self._planning = comm.subgroup(range(comm.size), "checkpoint plan")
        self._folder, self._keep, self._wait = Path(folder), keep, wait
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if comm.rank == 0:
            for unfinished in self._folder.glob(".step-*.part"):  # left by a killed save
                shutil.rmtree(unfinished, ignore_errors=True)

    def save(self, step: int, parts: Iterable[StoredPart], extra: dict) -> None:
        """Save the parts, and rank 0's `extra` (anything JSON can hold), as the state after `step` steps."""
        self.finish()
        mine = [
            StoredPart(kind, placement, tensor.detach().to("cpu", copy=True).contiguous())
            for kind, placement, tensor in _to_write(self._planning, list(parts))
        ]
        self._thread = threading.Thread(target=self._write, args=(step, mine, extra), name="checkpoint")
        self._thread.start()
        if self._wait:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in progress, if any. Raises the error that it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, step: int, parts: list[StoredPart], extra: dict) -> None:
        try:
            # Every save needs its own subgroup: a subgroup's stream belongs to the thread that used it first.
            comm = self._comm.subgroup(range(self._comm.size), f"step {step}")
            _write_checkpoint(comm, self._folder, step, parts, extra, self._keep)
        except BaseException as error:
            self._error = error


def _to_write(comm, parts: list[StoredPart]) -> list[StoredPart]:
    """Choose the parts that this rank writes: one rank writes a replicated part, chosen by digest to share the load."""
    if comm.size == 1:
        return parts
    digests = [checksum(repr((part.kind, part.placement.part)).encode()) for part in parts]
    mine = torch.tensor([int(digest[:15], 16) for digest in digests], dtype=torch.int64)
    lengths = comm.all_gather(torch.tensor([len(mine)]), algorithm="ring").tolist()
    everywhere = comm.all_gather(mine, sizes=lengths).split(lengths)
    holders: dict[int, list[int]] = {}
    for rank, theirs in enumerate(everywhere):
        for digest in theirs.tolist():
            holders.setdefault(digest, []).append(rank)
    return [
        part
        for part, digest in zip(parts, mine.tolist())
        if holders[digest][digest % len(holders[digest])] == comm.rank
    ]


def _write_checkpoint(comm, folder: Path, step: int, parts: list[StoredPart], extra: dict, keep: int) -> None:
    final, beside = folder / _name(step), folder / f".{_name(step)}.part"
    if comm.rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    comm.barrier()
    file = beside / f"rank-{comm.rank:05}.safetensors"
    save_file({str(i): part.tensor for i, part in enumerate(parts)}, file)
    _flush(file)
    described = [
        {"key": str(i), "kind": part.kind, "placement": _described(part.placement)}
        for i, part in enumerate(parts)
    ]
    files = gather_objects(comm, (file.name, file.stat().st_size, checksum(file.read_bytes()), described))
    if comm.rank == 0:
        entries = {
            name: {"bytes": size, "digest": digest, "parts": held} for name, size, digest, held in files
        }
        content = {"format": FORMAT, "step": step, "extra": extra, "files": entries}
        content["digest"] = checksum(json.dumps(content, sort_keys=True).encode())
        write_whole(beside / MANIFEST, json.dumps(content))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(beside, final)
        _flush(folder)
        for old in checkpoints(folder)[keep:] if keep else []:
            shutil.rmtree(old, ignore_errors=True)
    comm.barrier()


def _described(placement: Placement) -> dict:
    """The fields of a placement that a reader needs: which elements of which tensor."""
    fields = ("name", "global_shape", "start", "length", "flat")
    return {field: getattr(placement, field) for field in fields}


def _name(step: int) -> str:
    return f"step-{step:08}"


def _flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, from the operating system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
