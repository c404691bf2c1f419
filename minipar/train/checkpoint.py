"""Checkpoints: every rank writes what it holds, nothing is gathered, and any other mesh can read it.

    FOLDER/step-00000010/rank-00000.safetensors ...   the parts, each stored by one of the ranks that hold it
    FOLDER/step-00000010/manifest.json                which part of what each tensor is; sizes and checksums of the files

A part is described by its placement, so a reader with other placements takes from each stored part what overlaps its
own. The folder appears by one rename when everything in it is on the disk: until then it has another name, and a save
that was killed leaves the checkpoints before it as they were.
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
    """A local tensor to be stored: `kind` is "parameter" or a key of the optimizer's state, "exp_avg" and so on."""

    kind: str
    placement: Placement
    tensor: torch.Tensor


class Saver:
    """Writes checkpoints of one run, one after another, while training goes on.

    comm      all ranks; a subgroup of it, for the writing threads, is made here
    keep      how many of the newest stay; 0: all
    wait      do not return from `save` before the checkpoint is there

    `save` costs the training loop a copy of what this rank writes; then a thread writes it. At most one is under way:
    a second `save` first waits for the one before.
    """

    def __init__(self, comm, folder: Path, keep: int = 3, wait: bool = False):
        self._comm = comm.subgroup(range(comm.size), "checkpoint")
        self._planning = comm.subgroup(range(comm.size), "checkpoint plan")
        self._folder, self._keep, self._wait = Path(folder), keep, wait
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if comm.rank == 0:
            for unfinished in self._folder.glob(".step-*.part"):  # of a save that was killed
                shutil.rmtree(unfinished, ignore_errors=True)

    def save(self, step: int, parts: Iterable[StoredPart], extra: dict) -> None:
        """Store the parts and `extra`, anything JSON can hold and alike on every rank, as the state after `step` steps."""
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
        """Wait for a save that is under way. Raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, step: int, parts: list[StoredPart], extra: dict) -> None:
        try:
            # A subgroup of its own for every save: a stream belongs to the thread that used it first.
            comm = self._comm.subgroup(range(self._comm.size), f"step {step}")
            _write_checkpoint(comm, self._folder, step, parts, extra, self._keep)
        except BaseException as error:
            self._error = error


def _to_write(comm, parts: list[StoredPart]) -> list[StoredPart]:
    """Of what several ranks hold alike, one of them writes it: not always the first, so that all write about as much."""
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
    """What a reader needs to know of a placement; who else held it does not matter to it."""
    fields = ("name", "global_shape", "start", "length", "flat")
    return {field: getattr(placement, field) for field in fields}


def _name(step: int) -> str:
    return f"step-{step:08}"


def _flush(path: Path) -> None:
    """What the operating system still holds of a file, or of a folder's list of names, goes to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
