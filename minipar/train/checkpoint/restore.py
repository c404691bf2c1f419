"""Reading checkpoints: choose the newest undamaged one, and read the part of a tensor that a given placement describes.

saver.py describes a checkpoint. Its manifest lists the parts by tensor, so that a reader finds the parts that overlap its
own by bisection. Each part has a checksum of its own, so that ranks can share the work of checking them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from minipar.comm import Comm
from minipar.comm.objects import all_gather_objects
from minipar.mesh import Placement, overlap
from minipar.train.checkpoint.manifest import (
    MANIFEST,
    StoredBlock,
    checksum,
    checksum_of_part,
    key_of,
    read_manifest,
)
from minipar.train.checkpoint.tensor_file import TensorFile

T = TypeVar("T")
CHECKING_THREADS = 4  # per process; hashing releases the GIL

# Choosing -----------------------------------------------------------------------------------------------------------


class CheckpointRef(NamedTuple):
    """A checkpoint to read: its folder, its step, and its manifest's checksum, which ranks compare to read the same one."""

    path: Path
    digest: str
    step: int

    def open(self) -> Checkpoint:
        return Checkpoint(self.path, self.digest)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first, damaged ones included.

    Raises ValueError if the folder exists but cannot be listed, which does not mean that it has no checkpoints.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(
            f"the checkpoints in {folder} cannot be listed: {error.strerror}; try again when they can"
        ) from None
    found = [name for name in names if name.startswith("step-") and name[5:].isdigit()]
    return [Path(folder) / name for name in sorted(found, key=lambda name: int(name[5:]), reverse=True)]


def newest_whole(folder: Path, kinds: set[str] | None = None) -> Path | None:
    """Return the newest checkpoint whose parts of these kinds (None: all) are undamaged; warn about damaged newer ones."""
    for path in checkpoints(folder):
        damage = find_damage(path, kinds)
        if damage is None:
            return path
        _warn_of(path, damage)
    return None


def agree_on_newest(comm: Comm, folder: Path) -> Path | None:
    """Return the same `newest_whole` on all ranks. Rank 0 lists the folder, and each rank checks its share of the parts.

    All ranks skip a checkpoint that some rank cannot read, or whose manifest differs between ranks. All-gathers a
    few hundred bytes for each checkpoint considered; each rank reads 1/p of it.
    """
    for path in decided_on_rank_0(comm, partial(checkpoints, folder)):
        seen = all_gather_objects(comm, _digest_and_damage(path, comm.rank, comm.size))
        found = [f"{damage}, on rank {rank}" for rank, (_, damage) in enumerate(seen) if damage]
        if not found and len({digest for digest, _ in seen}) > 1:
            found = [f"{MANIFEST}: not the same on every rank"]
        if not found:
            return path
        if comm.rank == 0:
            _warn_of(path, found[0])
    return None


def decided_on_rank_0(comm: Comm | None, decide: Callable[[], T]) -> T:
    """Return, on every rank, what `decide()` returns on rank 0, or raise the ValueError that it raises there.

    comm  None: this process alone
    """
    if comm is None:
        return decide()
    answer = refusal = None
    if comm.rank == 0:
        try:
            answer = decide()
        except ValueError as error:
            refusal = str(error)
    decision: T
    decision, refusal = all_gather_objects(comm, (answer, refusal))[0]
    if refusal is not None:
        raise ValueError(refusal)
    return decision


def _warn_of(path: Path, damage: str) -> None:
    warnings.warn(f"checkpoint {path} is damaged ({damage}); looking for an older one", stacklevel=3)


def _digest_and_damage(path: Path, rank: int, size: int) -> tuple[str, str | None]:
    try:
        checkpoint = Checkpoint(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return "", _in_words(MANIFEST, error)
    return checkpoint.digest, _damage_in(checkpoint, None, rank, size)


def find_damage(path: Path, kinds: set[str] | None = None, threads: int = CHECKING_THREADS) -> str | None:
    """Return a description of a checkpoint's damage, or None. Reads all parts of these kinds; None: of every kind."""
    try:
        checkpoint = Checkpoint(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _in_words(MANIFEST, error)
    with ThreadPoolExecutor(threads) as pool:
        shares = pool.map(lambda i: _damage_in(checkpoint, kinds, i, threads), range(threads))
        return next(filter(None, shares), None)


def _damage_in(checkpoint: Checkpoint, kinds: set[str] | None, index: int, count: int) -> str | None:
    """Check the size and header of every `count`-th file, and every `count`-th part, starting at number `index`."""
    name = ""
    try:
        for name, entry in islice(checkpoint.files.items(), index, None, count):
            size = (checkpoint.path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name}: {size} bytes, it should have {entry['bytes']}"
            if checksum(checkpoint.file(name).header_bytes) != entry["header"]:
                return f"{name}: its header's checksum differs"
        for name, key, digest in islice(checkpoint.stored_parts(kinds), index, None, count):
            if checksum_of_part(checkpoint.file(name).blocks(key)) != digest:
                return f"{name}: the checksum of {key} differs"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _in_words(name, error)
    return None


def _in_words(name: str, error: Exception) -> str:
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return said if name in said else f"{name}: {said}"


# Reading ------------------------------------------------------------------------------------------------------------


class Checkpoint:
    """A checkpoint opened for reading, on any mesh.

    step     the number of steps done when it was saved
    extra    as given to `Saver.save`
    kinds    the kinds of the stored parts: "parameter", "exp_avg", ...
    files    name -> bytes, and the checksum of the header
    digest   the manifest's checksum; it must equal the argument `digest`, if given

    Raises ValueError if the manifest is damaged, has another format or another checksum; OSError if it is missing.
    """

    def __init__(self, path: Path, digest: str | None = None):
        self.path = Path(path)
        manifest, self.digest = read_manifest(self.path)
        if digest not in (None, self.digest):
            raise ValueError(f"{path} is not, on this rank, the checkpoint that rank 0 chose")
        self.step, self.extra, self.files = manifest["step"], manifest["extra"], manifest["files"]
        self._tensors: dict[str, Any] = manifest["tensors"]
        self._file_names = list(self.files)
        self._opened: dict[str, TensorFile] = {}
        self._sorted: dict[str, list[StoredBlock]] = {}

    @property
    def chosen(self) -> CheckpointRef:
        return CheckpointRef(self.path, self.digest, self.step)

    @property
    def kinds(self) -> set[str]:
        return {kind for tensor in self._tensors.values() for kind in tensor["kinds"]}

    def has(self, kind: str, name: str) -> bool:
        return name in self._tensors and kind in self._tensors[name]["kinds"]

    def names(self, kind: str) -> list[str]:
        return [name for name in self._tensors if self.has(kind, name)]

    def global_shape(self, kind: str, name: str) -> tuple[int, ...]:
        self._require(kind, name)
        return tuple(self._tensors[name]["shape"])

    def dtype(self, kind: str, name: str) -> torch.dtype:
        self._require(kind, name)
        file = next(
            self._file_names[file] for file, *_, kinds in self._tensors[name]["parts"] if kind in kinds
        )
        return self.file(file).dtype(key_of(kind, name))

    def read(self, kind: str, wanted: Placement) -> torch.Tensor:
        """Assemble the local tensor of this placement, reading only what overlaps it from each stored part.

        Raises ValueError, naming the tensor, where some or all of its elements are not stored.
        """
        name, key = wanted.name, key_of(kind, wanted.name)
        local = torch.empty(wanted.local_shape, dtype=self.dtype(kind, name))
        missing = wanted.numel
        for file, stored in self._overlapping(kind, wanted):
            for box, source, target in overlap(stored, wanted):
                start = tuple(a - b for a, b in zip(box.start, source.box.start))
                read = self.file(file).read(key, source.box.length, start, box.length, source.offset or 0)
                target.of_local(local, box).copy_(read)
                missing -= box.numel
        if missing:
            raise ValueError(f"{self.path}: {missing} elements of {kind} of {name} are in no file")
        return local

    def file(self, name: str) -> TensorFile:
        if name not in self._opened:
            self._opened[name] = TensorFile(self.path / name)
        return self._opened[name]

    def stored_parts(self, kinds: set[str] | None = None) -> Iterator[tuple[str, str, str]]:
        """Yield (file, key, checksum) of every part of these kinds; None: of every kind."""
        for name, tensor in self._tensors.items():
            for file, _, _, digests in tensor["parts"]:
                for kind, digest in digests.items():
                    if kinds is None or kind in kinds:
                        yield self._file_names[file], key_of(kind, name), digest

    def _require(self, kind: str, name: str) -> None:
        if not self.has(kind, name):
            raise ValueError(f"{self.path} has no {kind} of {name}")

    def _overlapping(self, kind: str, wanted: Placement) -> Iterator[tuple[str, Placement]]:
        """Yield (file, placement) of the stored parts of this kind that may have elements of `wanted`."""
        tensor, name = self._tensors[wanted.name], wanted.name
        if name not in self._sorted:
            self._sorted[name] = [
                StoredBlock(i, block, tensor["parts"]) for i, block in enumerate(tensor["blocks"])
            ]
        for block in self._sorted[name]:
            for part in block.parts_near(wanted):
                if kind in part.digests:
                    where = Placement(name, tensor["shape"], *block.box, part.flat, rows=block.rows)
                    yield self._file_names[part.file], where
