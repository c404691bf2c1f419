"""Reading checkpoints: find the newest undamaged one, and read the part of a tensor that any placement describes."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import torch
from safetensors import safe_open

from minipar.mesh import Placement, overlap

FORMAT = 1
MANIFEST = "manifest.json"


def checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, damaged ones included."""
    found = [path for path in Path(folder).glob("step-*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def newest_whole(folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint, or None; warn about every newer one that is damaged."""
    for path in checkpoints(folder):
        damage = find_damage(path)
        if damage is None:
            return path
        warnings.warn(f"checkpoint {path} is damaged ({damage}); looking for an older one", stacklevel=2)
    return None


def find_damage(path: Path) -> str | None:
    """Describe what is wrong with a checkpoint, or return None. Reads all of it."""
    name = MANIFEST
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        stated = manifest.pop("digest", None)
        if stated != checksum(json.dumps(manifest, sort_keys=True).encode()):
            return f"{MANIFEST}: its checksum differs"
        if manifest["format"] != FORMAT:
            return f"{MANIFEST}: format {manifest['format']}, this program reads {FORMAT}"
        for name, entry in manifest["files"].items():
            data = (path / name).read_bytes()
            if len(data) != entry["bytes"]:
                return f"{name}: {len(data)} bytes, it should have {entry['bytes']}"
            if checksum(data) != entry["digest"]:
                return f"{name}: its checksum differs"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{name}: {type(error).__name__}: {error}"
    return None


class Checkpoint:
    """A checkpoint opened for reading, on any mesh.

    step     the number of steps done when it was saved
    extra    as given to `Saver.save`
    kinds    the kinds of the stored parts: "parameter", "exp_avg", ...
    """

    def __init__(self, path: Path):
        manifest = json.loads((path / MANIFEST).read_text())
        self.path, self.step, self.extra = path, manifest["step"], manifest["extra"]
        self._stored: dict[tuple[str, str], list[tuple[str, str, Placement]]] = {}
        for name, entry in manifest["files"].items():
            for part in entry["parts"]:
                placement = Placement(**part["placement"])
                self._stored.setdefault((part["kind"], placement.name), []).append(
                    (name, part["key"], placement)
                )
        self._files: dict[str, safe_open] = {}

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._stored}

    def has(self, kind: str, name: str) -> bool:
        return (kind, name) in self._stored

    def names(self, kind: str) -> list[str]:
        return [name for k, name in self._stored if k == kind]

    def global_shape(self, kind: str, name: str) -> tuple[int, ...]:
        return self._stored[kind, name][0][2].global_shape

    def read(self, kind: str, wanted: Placement) -> torch.Tensor:
        """Assemble the local tensor of this placement from the stored parts that overlap it.

        Raises ValueError, with the name, where none or not all of its elements are stored.
        """
        stored = self._stored.get((kind, wanted.name))
        if stored is None:
            raise ValueError(f"{self.path} has no {kind} of {wanted.name}")
        file, key, _ = stored[0]
        local, missing = self._tensor(file, key).new_empty(wanted.local_shape), wanted.numel
        for file, key, placement in stored:
            for box, source, target in overlap(placement, wanted):
                tensor = self._tensor(file, key)
                target.of_local(local, box).copy_(source.of_local(tensor, box))
                missing -= box.numel
        if missing:
            raise ValueError(f"{self.path}: {missing} elements of {kind} of {wanted.name} are in no file")
        return local

    def _tensor(self, file: str, key: str) -> torch.Tensor:
        if file not in self._files:
            self._files[file] = safe_open(self.path / file, framework="pt")
        return self._files[file].get_tensor(key)
