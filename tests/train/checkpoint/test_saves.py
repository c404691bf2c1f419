"""A save that fails or takes long is reported as itself; only whole checkpoints count as kept."""

import json
import os
import re
import shutil
import threading
import time
import warnings

import pytest
import torch

import minipar
from minipar.mesh import Placement
from minipar.support.errors import SaveError
from minipar.train.checkpoint import retention
from minipar.train.checkpoint import saver as checkpoint
from minipar.train.checkpoint.manifest import FORMAT, MANIFEST, by_tensor, with_digest
from minipar.train.checkpoint.restore import Checkpoint, checkpoints, find_damage, newest_whole
from minipar.train.checkpoint.saver import Saver, StoredPart
from minipar.train.checkpoint.tensor_file import DTYPES
from tests.train.checkpoint.test_checkpoint import damage_bit, damage_cut


def parts(world, step: float = 0.0) -> list[StoredPart]:
    placement = Placement.whole("w", (64,)).shard(0, world.rank, world.size)
    return [StoredPart("parameter", placement, torch.full(placement.local_shape, float(step)))]


def fails_in_a_save(world, folder, rank, call):
    saver = Saver(world, folder)
    saver.save(1, parts(world), {})
    saver.finish()

    def full(*args):
        raise OSError(28, "No space left on device")

    def late(*args, **options):
        time.sleep(0.5)  # meanwhile the others would raise, and end this rank
        remove(*args, **options)

    remove = shutil.rmtree
    if world.rank == 0:
        shutil.rmtree = late
    if world.rank == rank:
        setattr(checkpoint, call, full)
    saver.save(2, parts(world), {})
    for _ in range(2):  # the parts, the manifest
        saver._task.wait(30)
        world.barrier()
        saver.poll()
    return "nothing was said"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rank", "call"), [(1, "save_file"), (0, "save_file"), (0, "write_whole")])
def test_a_rank_that_cannot_write_is_named_at_the_next_step(tmp_path, rank, call):
    with pytest.raises(minipar.RankError, match="No space left on device") as caught:
        minipar.run(fails_in_a_save, tmp_path, rank, call, world_size=3)
    assert caught.value.rank == rank
    assert f"the checkpoint after step 2 could not be written to {tmp_path}: rank {rank}" in str(caught.value)
    assert newest_whole(tmp_path).name == "step-00000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def saves_after_a_failure(world, folder):
    saver, write = Saver(world, folder), checkpoint._write_parts
    checkpoint._write_parts = lambda *_: 1 / 0
    try:
        saver.save(1, parts(world), {})
        with pytest.raises(SaveError, match="ZeroDivisionError"):
            saver.finish()
    finally:
        checkpoint._write_parts = write
    saver.save(2, parts(world), {})
    saver.finish()


def test_a_save_after_one_that_failed_is_as_good_as_any(tmp_path):
    minipar.run(saves_after_a_failure, tmp_path, world_size=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002"]


def saves_with_a_disk_per_rank(world, folder):
    save_each(world, folder, (1,), 1)
    plain = checkpoint._write_parts
    own = folder.with_name(f"of rank {world.rank}") if world.rank else folder
    checkpoint._write_parts = lambda beside, *rest: plain(own / beside.name, *rest)
    try:
        save_each(world, folder, (2,), 1)
    finally:
        checkpoint._write_parts = plain


def test_an_unshared_folder_is_refused_and_older_saves_remain(tmp_path):
    folder = tmp_path / "of rank 0"
    with pytest.raises(
        minipar.RankError, match="rank-00001.safetensors was written, and rank 0 does not find it; .* share"
    ):
        minipar.run(saves_with_a_disk_per_rank, folder, world_size=2)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert find_damage(folder / "step-00000001") is None


def writes_when_told(world, folder, deadline_s):
    saver = Saver(world, folder, deadline_s=deadline_s)
    plain, told = checkpoint.save_file, threading.Event()

    def slow(*args):
        assert told.wait(60)
        plain(*args)

    if world.rank == 1:
        checkpoint.save_file = slow
    try:
        saver.save(1, parts(world), {})
        saver._task.wait(30 if world.rank == 0 else 0)
        for _ in range(20):
            saver.poll()
        unfinished = saver._task is not None
        told.set()
        saver.finish()
        return unfinished
    finally:
        told.set()
        checkpoint.save_file = plain


def test_a_slow_disk_holds_up_no_other_rank(tmp_path):
    assert minipar.run(writes_when_told, tmp_path, 600.0, world_size=2) == [True, True]
    assert newest_whole(tmp_path).name == "step-00000001"


def test_a_save_past_its_own_deadline_names_the_slow_rank(tmp_path):
    with pytest.raises(minipar.RankError, match="TimeoutError: .* after step 1 .*rank 1 is still writing"):
        minipar.run(writes_when_told, tmp_path, 0.0, world_size=2)
    assert newest_whole(tmp_path) is None


def trains_while_a_thread_writes(world, folder):
    """Overwrites the weights while their copy is being written; returns what was a checkpoint before and after that."""
    saver, plain, told = Saver(world, folder), checkpoint.save_file, threading.Event()
    kept, memory = [], parts(world, 1.0)

    def slow(tensors, file):
        kept.append(sum(x.nbytes for x in tensors.values()))
        assert told.wait(60)
        plain(tensors, file)

    checkpoint.save_file = slow
    try:
        saver.save(1, memory, {})
        for step in range(3):
            memory[0].tensor.fill_(2.0 + step)
            saver.poll()
        world.barrier()
        before = checkpoints(folder)
        world.barrier()
        told.set()
        saver.finish()
        return kept[0] - memory[0].tensor.nbytes, before, [path.name for path in checkpoints(folder)]
    finally:
        told.set()
        checkpoint.save_file = plain


def test_a_save_stalls_for_a_copy_and_a_thread_writes_it(tmp_path):
    """A copy of 20 GB at PCIe 4's 25 GB/s: under a second. Without a manifest, nothing that is there is a checkpoint."""
    assert 20 / 25 == 0.8
    on_ranks = minipar.run(trains_while_a_thread_writes, tmp_path, world_size=2)
    assert on_ranks == [(0, [], ["step-00000001"])] * 2
    read = Checkpoint(newest_whole(tmp_path)).read("parameter", Placement.whole("w", (64,)))
    assert torch.equal(read, torch.ones(64))


def save_each(world, folder, steps, keep, resumed=None):
    saver = Saver(world, folder, keep=keep, wait=True, resumed=resumed)
    for step in steps:
        saver.save(step, parts(world, step), {})


def left(folder) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints(folder)]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        minipar.RankError, match=f"after step 1 could not be written to {tmp_path}/file: rank"
    ):
        minipar.run(save_each, tmp_path / "file", (1,), 0, world_size=2)


def test_what_a_killed_save_has_left_is_removed(tmp_path):
    (tmp_path / ".step-00000003.part").mkdir()
    (tmp_path / ".step-00000003.part" / "rank-00000.safetensors").touch()
    minipar.run(lambda world: Saver(world, tmp_path) and None, world_size=2)
    assert list(tmp_path.iterdir()) == []


def test_damaged_saves_do_not_count_and_the_resumed_one_stays(tmp_path):
    minipar.run(save_each, tmp_path, (10, 20), 2, world_size=2)
    newest, resumed = checkpoints(tmp_path)
    damage_bit(newest / "rank-00000.safetensors")
    minipar.run(save_each, tmp_path, (12, 14, 16), 2, resumed, world_size=2)
    assert left(tmp_path) == [20, 16, 14, 10]
    with pytest.warns(UserWarning, match="step-00000020 is damaged"):
        assert newest_whole(tmp_path).name == "step-00000016"


def test_one_that_is_damaged_while_the_run_goes_on_is_seen_too(tmp_path):
    def rank(world):
        save_each(world, tmp_path, (1, 2), 2)
        saver = Saver(world, tmp_path, keep=2, wait=True)
        saver.save(3, parts(world), {})
        damage_bit(tmp_path / "step-00000003" / "rank-00000.safetensors")
        saver.save(4, parts(world), {})

    minipar.run(rank, world_size=1)
    assert left(tmp_path) == [4, 3, 2]


def test_only_what_an_earlier_run_wrote_is_read_and_once(tmp_path):
    def read(world):
        paths, plain = [], retention.find_damage
        retention.find_damage = lambda path, **how: paths.append(path) or plain(path, **how)
        try:
            save_each(world, tmp_path, (2, 3), 3)
        finally:
            retention.find_damage = plain
        return [path.name for path in paths]

    minipar.run(save_each, tmp_path, (1,), 3, world_size=1)
    assert minipar.run(read, world_size=1) == [["step-00000001"]]


def test_the_one_just_written_stays_though_others_have_higher_numbers(tmp_path):
    minipar.run(save_each, tmp_path, (10, 20), 0, world_size=1)
    minipar.run(save_each, tmp_path, (5,), 1, world_size=1)
    assert left(tmp_path) == [20, 5]


def test_a_file_named_like_a_checkpoint_stops_no_save(tmp_path):
    (tmp_path / "step-00000001").touch()
    minipar.run(save_each, tmp_path, (2, 3, 4), 2, world_size=2)
    assert left(tmp_path) == [4, 3, 1]


def test_checking_old_checkpoints_spares_a_saves_deadline(tmp_path):
    def rank(world):
        saver, plain, told = Saver(world, tmp_path, keep=2), retention.find_damage, threading.Event()

        def slow(path, **how):
            saver._deadline_s = 0.0
            assert told.wait(60)
            return plain(path, **how)

        retention.find_damage = slow
        try:
            saver.save(2, parts(world), {})
            while saver._deadline_s:
                saver._task.wait(0.01)
                saver.poll()
            saver.poll()
            told.set()
            saver.finish()
        finally:
            told.set()
            retention.find_damage = plain

    minipar.run(save_each, tmp_path, (1,), 2, world_size=1)
    minipar.run(rank, world_size=1)
    assert left(tmp_path) == [2, 1]


def test_unlistable_old_checkpoints_warn_and_the_save_is_done(tmp_path):
    def rank(world):
        def fails(folder):
            raise ValueError(f"the checkpoints in {folder} cannot be listed")

        plain, retention.checkpoints = retention.checkpoints, fails
        try:
            with warnings.catch_warnings(record=True, action="always") as said:
                save_each(world, tmp_path, (1, 2), 1)
            return [str(warning.message) for warning in said]
        finally:
            retention.checkpoints = plain

    why = f"ValueError: the checkpoints in {tmp_path} cannot be listed"
    said = [f"old checkpoints in {tmp_path} could not be removed: {why}"] * 2
    assert minipar.run(rank, world_size=2) == [said, []]
    assert left(tmp_path) == [2, 1]


def test_a_step_that_is_saved_again_replaces_its_checkpoint(tmp_path):
    """As after a resume from before a damaged one."""
    minipar.run(save_each, tmp_path, (10,), 3, world_size=1)
    damage_bit(tmp_path / "step-00000010" / "rank-00000.safetensors")
    minipar.run(save_each, tmp_path, (10,), 3, world_size=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert newest_whole(tmp_path).name == "step-00000010"


@pytest.mark.parametrize("new", ["complete", "cut", "without manifest"])
def test_a_save_killed_in_replacing_leaves_the_new_or_the_old(tmp_path, new):
    for value in (1.0, 2.0):  # a save of the step that is killed between its two renames
        minipar.run(save_value, tmp_path / str(value), value, world_size=2)
    written = tmp_path / "2.0" / ".step-00000010.part"
    os.replace(tmp_path / "2.0" / "step-00000010", written)
    os.replace(tmp_path / "1.0" / "step-00000010", tmp_path / "2.0" / ".step-00000010.replaced.part")
    if new == "cut":
        damage_cut(written / "rank-00001.safetensors")
    elif new == "without manifest":
        (written / MANIFEST).unlink()
    minipar.run(lambda world: Saver(world, tmp_path / "2.0") and None, world_size=2)
    assert [path.name for path in (tmp_path / "2.0").iterdir()] == ["step-00000010"]
    got = Checkpoint(newest_whole(tmp_path / "2.0")).read("parameter", Placement.whole("w", (64,)))
    assert torch.equal(got, torch.full((64,), 2.0 if new == "complete" else 1.0))


def save_value(world, folder, value):
    Saver(world, folder, wait=True).save(10, parts(world, value), {})


KINDS_OF_NUMBERS = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}


def save_dtype(world, folder, dtype):
    """Save 64 bytes as numbers of this type."""
    tensor = torch.arange(64, dtype=torch.uint8)
    tensor = tensor.fill_(1) if dtype == torch.bool else tensor
    tensor = tensor.view(dtype)
    place = Placement.whole("w", tuple(tensor.shape))
    Saver(world, folder, wait=True).save(1, [StoredPart("parameter", place, tensor)], {})
    return place, tensor.view(torch.uint8)


def test_every_saved_dtype_can_be_read_and_others_are_refused(tmp_path):
    def rank(world):
        read, refused = set(), set()
        for dtype in KINDS_OF_NUMBERS:
            folder = tmp_path / str(dtype)
            try:
                place, want = save_dtype(world, folder, dtype)
            except (ValueError, RuntimeError):  # torch has no view of bytes as some of the types
                refused.add(dtype)
                continue
            got = Checkpoint(newest_whole(folder)).read("parameter", place)
            assert got.dtype == dtype
            assert torch.equal(got.view(torch.uint8), want), dtype
            read.add(dtype)
        return read, refused

    ((read, refused),) = minipar.run(rank, world_size=1)
    assert read == set(DTYPES.values())
    assert {torch.complex128, torch.float4_e2m1fn_x2} <= refused


def test_an_unreadable_dtype_is_refused_before_any_write(tmp_path):
    with pytest.raises(
        minipar.RankError, match="parameter of w is of torch.complex128, which a checkpoint can"
    ):
        minipar.run(save_dtype, tmp_path, torch.complex128, world_size=1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_bytes_behind_its_tensors_is_damaged(tmp_path):
    minipar.run(save_each, tmp_path, (10,), 3, world_size=1)
    (newest,) = checkpoints(tmp_path)
    assert find_damage(newest) is None
    with (newest / "rank-00000.safetensors").open("ab") as file:
        file.write(b"0")
    assert re.fullmatch(r"rank-00000.safetensors: \d+ bytes, it should have \d+", find_damage(newest))


def test_a_reader_looks_only_at_files_overlapping_its_part(tmp_path):
    ranks, names, size = 1024, [f"layers.{i}.weight" for i in range(4)], 1 << 20
    cut = lambda r: (r * size // ranks, (r + 1) * size // ranks)  # noqa: E731
    holds = lambda r: ranks - 1 - r  # noqa: E731 - rank 0 holds the last range: files are in no order of their ranges
    place = lambda name, r: (name, (1024, 1024), ((0, 0), (1024, 1024)), cut(holds(r)))  # noqa: E731
    listed = [[(place(name, r), {"parameter": "0" * 16}) for name in names] for r in range(ranks)]
    manifest = {"format": FORMAT, "step": 1, "extra": {}, "files": {f"rank-{r:05}": {} for r in range(ranks)}}
    text = with_digest({**manifest, "tensors": by_tensor(listed)})
    (tmp_path / MANIFEST).write_text(text)
    assert len(text) < ranks * len(names) * 75
    opened = Checkpoint(tmp_path)
    whole = Placement.whole(names[1], (1024, 1024))
    for wanted, files in [
        (whole.flatten_range(*cut(7)), {7}),
        (whole.flatten_range(size // 2 - 1, size // 2 + 1), {511, 512}),
        (whole.shard(0, 3, 512), {6, 7}),
        (whole, set(range(ranks))),
    ]:
        found = {file for file, _ in opened._overlapping("parameter", wanted)}
        assert found == {f"rank-{holds(r):05}" for r in files}


def test_a_checkpoint_of_another_format_is_refused_in_words(tmp_path):
    minipar.run(save_each, tmp_path, (1,), 0, world_size=1)
    (path,) = checkpoints(tmp_path)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(with_digest({**manifest, "format": 1}))
    assert find_damage(path) == f"{MANIFEST}: format 1, this program reads {FORMAT}"
