import os
import stat

import pytest

import minipar
from minipar.comm.objects import gather_objects
from minipar.support.atomic_files import prepare_folder, write_whole


def test_a_file_is_there_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "before")

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o027])
def test_a_file_is_as_private_as_the_umask_says(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "file", "content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


def test_a_folder_under_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        prepare_folder(tmp_path / "file" / "runs")


def test_values_of_all_ranks_meet_on_the_root():
    values = minipar.run(
        lambda world: gather_objects(world, {"rank": world.rank, "x": "y" * world.rank}, root=1), world_size=3
    )
    assert values == [None, [{"rank": r, "x": "y" * r} for r in range(3)], None]
