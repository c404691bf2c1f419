"""A checkpoint written on one mesh is read on any other, bit by bit; a damaged one is never taken for whole."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.mesh import Mesh, Placement
from minipar.train.checkpoint.manifest import MANIFEST
from minipar.train.checkpoint.restore import Checkpoint, checkpoints, find_damage, newest_whole
from minipar.train.checkpoint.saver import Saver, StoredPart
from tests.strategies import mesh_sizes, num_ranks, seeds

SHAPES = {"a": (6, 5), "b": (7,), "c": (2, 3, 4), "d": (), "e": (6, 5)}


def full(seed: int, kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + len(kind))
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }


def placements(mesh) -> list[Placement]:
    """What a rank of this mesh holds: cut over tp, then over dp as ZeRO does; `d` whole; rows of `e` dealt out over dp."""
    at, sizes = mesh.coordinates, mesh.sizes
    held = []
    for name, shape in SHAPES.items():
        placement = Placement.whole(name, shape)
        if shape:
            placement = placement.shard(len(shape) - 1, at.tp, sizes["tp"])
        if name == "e":
            placement = placement.shard(0, at.dp, sizes["dp"])
            first, count = placement.start[0], placement.length[0]
            placement = placement.with_rows((5 * i + sizes["dp"]) % 6 for i in range(first, first + count))
        elif shape:
            edges = [placement.numel * i // sizes["dp"] for i in (at.dp, at.dp + 1)]
            placement = placement.flatten_range(*edges)
        held.append(placement.replicate("pp"))
    return held


def write(world, sizes, folder, seed, steps=(3,), keep=3):
    mesh = Mesh(world, **sizes)
    saver = Saver(world, folder, keep=keep)
    for step in steps:
        parts = [
            StoredPart(kind, p, p.slice_of(full(seed + step, kind)[p.name]))
            for kind in ("parameter", "exp_avg")
            for p in placements(mesh)
        ]
        saver.save(step, parts, {"seed": seed})
        for part in parts:
            part.tensor.zero_()  # training goes on while it is being written
    saver.finish()
    return sum(p.tensor.numel() for p in parts)


def read(world, sizes, path, seed):
    checkpoint = Checkpoint(path)
    for kind in ("parameter", "exp_avg"):
        for placement in placements(Mesh(world, **sizes)):
            want = placement.slice_of(full(seed + checkpoint.step, kind)[placement.name])
            assert torch.equal(checkpoint.read(kind, placement), want), (kind, placement)
    return checkpoint.step, checkpoint.extra


meshes = mesh_sizes(8, axes=("pp", "dp", "tp"))


@given(meshes, meshes, seeds)
def test_what_one_mesh_wrote_another_reads(tmp_path_factory, there, here, seed):
    folder = tmp_path_factory.mktemp("checkpoint")
    minipar.run(write, there, folder, seed, world_size=num_ranks(there))
    path = newest_whole(folder)
    for step, extra in minipar.run(read, here, path, seed, world_size=num_ranks(here)):
        assert (step, extra) == (3, {"seed": seed})


def test_every_element_is_written_once(tmp_path):
    sizes = {"pp": 2, "dp": 2, "tp": 2}
    minipar.run(write, sizes, tmp_path, 0, world_size=8)
    manifest = json.loads((newest_whole(tmp_path) / MANIFEST).read_text())
    written, writers = 0, set()
    for name, tensor in manifest["tensors"].items():
        for file, block, flat, digests in tensor["parts"]:
            start, length, *rows = tensor["blocks"][block]
            placement = Placement(name, tensor["shape"], start, length, flat, rows=(*rows, None)[0])
            written += placement.numel * len(digests)
            writers.add(file)
    assert written == 2 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert len(writers) > 4, "one rank writes for all"


def test_the_last_k_are_kept(tmp_path):
    minipar.run(write, {"dp": 2}, tmp_path, 0, (1, 2, 30, 4), 2, world_size=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000030", "step-00000004"]


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def damage_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_cut, damage_bit, os.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", ["rank-00001.safetensors", MANIFEST])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, damage, file):
    minipar.run(write, {"dp": 2}, tmp_path, 0, (1, 2), world_size=2)
    newest, before = checkpoints(tmp_path)
    damage(newest / file)
    assert file in find_damage(newest)
    with pytest.warns(UserWarning, match="step-00000002 is damaged") as caught:
        assert newest_whole(tmp_path) == before
    assert [warning.filename for warning in caught] == [__file__], "the warning is about the caller's line"


def test_no_checkpoint_at_all_is_none(tmp_path):
    assert newest_whole(tmp_path) is None
    assert newest_whole(tmp_path / "nowhere") is None


KILLED = """
import os, sys, minipar
from pathlib import Path
from minipar.train.checkpoint import saver as checkpoint
from tests.train.checkpoint.test_checkpoint import write

left = int(sys.argv[2])

def countdown(name):
    original = getattr(checkpoint, name)
    def counted(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return original(*args, **kwargs)
    setattr(checkpoint, name, counted)

class World:
    "A group of one, without a pool: the process to be killed is this one."
    rank, size, device = 0, 1, __import__("torch").device("cpu")
    ranks = (0,)
    def subgroup(self, ranks, name): return self
    def barrier(self): pass
    def all_gather(self, x, **_): return x
    def all_reduce(self, x, **_): return x

write(World(), {}, Path(sys.argv[1]), 0, steps=(1,))
for name in ("save_file", "_flush", "write_whole", "gather_objects"):
    countdown(name)
write(World(), {}, Path(sys.argv[1]), 0, steps=(2,))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("survived", range(6))
def test_kill_9_at_any_point_of_a_save_loses_nothing_older(tmp_path, survived):
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(survived)], cwd=os.getcwd())
    if survived < 5:
        assert process.returncode == -signal.SIGKILL
    path = newest_whole(tmp_path)
    assert path is not None
    assert path.name == ("step-00000001" if survived < 4 else "step-00000002")
    minipar.run(write, {}, tmp_path, 0, (3,), world_size=1)
    assert not list(tmp_path.glob(".*")), "what the killed save left is still there"
    checkpoint = Checkpoint(path)
    want = full(checkpoint.step, "parameter")["a"]
    assert torch.equal(checkpoint.read("parameter", Placement.whole("a", (6, 5))), want)


@given(st.sampled_from(["a", "z"]))
def test_what_is_not_stored_is_named(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("checkpoint")
    minipar.run(write, {"dp": 2}, folder, 0, world_size=2)
    checkpoint = Checkpoint(newest_whole(folder))
    with pytest.raises(ValueError, match="has no exp_avg_sq of" if name == "a" else "has no parameter of z"):
        checkpoint.read("exp_avg_sq" if name == "a" else "parameter", Placement.whole(name, (6, 5)))
