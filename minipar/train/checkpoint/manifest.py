"""The manifest of a checkpoint: which part of which tensor is in which file, with checksums.

    {"format", "step", "extra",
     "files":   {name: {"bytes", "header": checksum}},
     "tensors": {name: {"shape", "kinds", "blocks": [[start, length, rows]],
                        "parts": [[file, block, flat, {kind: checksum}]]}},
     "digest":  the checksum of everything before it}

A kind is what is stored of a parameter: itself ("parameter"), or a state of its optimizer, such as "exp_avg".
A part is the range `flat` (None: all) of a block; file and block are given by their indices. A block with `rows` has these
entries of dim 0, which need not be consecutive; most blocks have no third entry. One rank stores all kinds of a
part. Listed by tensor and with indices instead of names, the parts of 300 tensors over 1,024 ranks take 40 MB, and a reader
looks only at its own tensors' parts.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from minipar.mesh import Placement
from minipar.mesh.regions import Box

FORMAT = 2
MANIFEST = "manifest.json"
_DIGEST = ', "digest": '

Ints = tuple[int, ...]
Block = tuple[Ints, ...]  # start and length, and rows where a placement has them
DescribedPart = tuple[tuple[str, Ints, Block, tuple[int, int] | None], dict[str, str]]


class StoredRange(NamedTuple):
    """An entry of "parts": a range of a block, or all of it, and where it is stored."""

    file: int
    block: int
    flat: tuple[int, int] | None
    digests: dict[str, str]  # kind -> checksum


def checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def checksum_of_part(blocks: Iterable[bytes | memoryview]) -> str:
    """Return the checksum of a part's bytes, in only 16 hexadecimal digits, since a manifest has one for each part."""
    digest = hashlib.blake2b(digest_size=8)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def key_of(kind: str, name: str) -> str:
    """Return the key in a rank's file for the rank's part of a tensor."""
    return f"{kind}/{name}"


def block_of(place: Placement) -> Block:
    """Return the placement's block as the manifest has it."""
    return (place.start, place.length) + (() if place.rows is None else (place.rows,))


def by_tensor(parts_of_files: list[list[DescribedPart]]) -> dict[str, dict[str, Any]]:
    """Return the manifest's "tensors", from each file's parts: ((name, shape, block, flat), {kind: checksum})."""
    tensors: dict[str, dict[str, Any]] = {}
    numbers: dict[tuple[str, Block], int] = {}  # (name, block) -> number of the block
    for file, parts in enumerate(parts_of_files):
        for (name, shape, block, flat), digests in parts:
            tensor = tensors.setdefault(name, {"shape": shape, "kinds": {}, "blocks": [], "parts": []})
            if (name, block) not in numbers:
                numbers[name, block] = len(tensor["blocks"])
                tensor["blocks"].append(block)
            tensor["kinds"].update(dict.fromkeys(digests))
            tensor["parts"].append((file, numbers[name, block], flat, digests))
    for tensor in tensors.values():
        tensor["kinds"] = list(tensor["kinds"])
    return tensors


def with_digest(manifest: dict[str, Any]) -> str:
    """Return the manifest as JSON. Its last entry is the checksum of everything before it."""
    text = json.dumps(manifest)[:-1]
    return f'{text}{_DIGEST}"{checksum(text.encode())}"}}'


def read_manifest(path: Path) -> tuple[dict[str, Any], str]:
    """Return a checkpoint's manifest and its checksum. Raises ValueError if that differs, or the format is unknown."""
    text = (path / MANIFEST).read_text()
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        raise ValueError(f"{MANIFEST}: format {manifest['format']}, this program reads {FORMAT}")
    stated = manifest.pop("digest", None)
    if stated != checksum(text.rpartition(_DIGEST)[0].encode()):
        raise ValueError(f"{MANIFEST}: its checksum differs")
    return manifest, stated


class StoredBlock:
    """The stored parts of one block of a tensor, each a range of the block or all of it, in order."""

    def __init__(self, number: int, block: list[list[int]], parts: list[list[Any]]):
        self.box = Box(tuple(block[0]), tuple(block[1]))
        self.rows = tuple(block[2]) if len(block) > 2 else None
        whole = (0, prod(self.box.length))
        found = [
            StoredRange(file, of, None if flat is None else (flat[0], flat[1]), digests)
            for file, of, flat, digests in parts
            if of == number
        ]
        self._parts = sorted(found, key=lambda part: part.flat or whole)
        self._starts = [(part.flat or whole)[0] for part in self._parts]
        self._stops = [(part.flat or whole)[1] for part in self._parts]

    def parts_near(self, wanted: Placement) -> list[StoredRange]:
        """Return the parts that overlap the range from the first to the last element of `wanted` in this block."""
        if self.rows is not None:
            return self._parts
        first, last = self._range_of(wanted)
        return self._parts[bisect_right(self._stops, first) : bisect_left(self._starts, last)]

    def _range_of(self, wanted: Placement) -> tuple[int, int]:
        """Return the smallest range of the flattened block that contains all elements of `wanted` in this block."""
        first, last = prod(self.box.length), 0  # an empty range, which nothing overlaps
        strides = [prod(self.box.length[d + 1 :]) for d in range(len(self.box.length))]
        for piece in wanted.pieces():
            common = self.box.intersection(piece.box)
            if common.numel:
                at = sum((s - o) * stride for s, o, stride in zip(common.start, self.box.start, strides))
                extent = sum((n - 1) * stride for n, stride in zip(common.length, strides))
                first, last = min(first, at), max(last, at + extent + 1)
        return first, last
