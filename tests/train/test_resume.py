"""What a run goes on from: one rank chooses, all are told; what is refused changes nothing; what differs is said."""

import random
import warnings
from dataclasses import replace
from importlib import import_module

import pytest
import torch

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.support.errors import Stopped
from minipar.train import train, trainer
from minipar.train.checkpoint import restore
from minipar.train.checkpoint.restore import (
    TensorFile,
    agree_on_newest,
    checkpoints,
    decided_on_rank_0,
    newest_whole,
)
from minipar.train.data.text import TextId, load_data
from minipar.train.log import read_metrics
from minipar.train.resume import require_same_start, require_shared
from tests.train.checkpoint.test_checkpoint import damage_bit
from tests.train.checkpoint.test_saves import save_each

SMALL = ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=32)
BASE = TrainConfig(model=SMALL, batch_size=4, seq_len=16, steps=4, warmup=2, verify_steps=0, trace_steps=0)


def choose(world, folder, blind):
    """On a rank: the checkpoint chosen, the bytes read to check it, and the warnings.

    `blind` spoils rank 1's view of the folder.
    """
    read, blocks, plain = [], TensorFile.blocks, (restore.checkpoints, restore.read_manifest)
    if world.rank == 1 and blind == "lists an older one":
        restore.checkpoints = lambda folder: plain[0](folder)[1:]
    if world.rank == 1 and blind == "cannot open the newest":

        def read_manifest(path):
            if path.name == "step-00000002":
                raise FileNotFoundError(path)
            return plain[1](path)

        restore.read_manifest = read_manifest
    if world.rank == 1 and blind == "has another of this name":

        def read_another(path):
            manifest, digest = plain[1](path)
            return manifest, "another" if path.name == "step-00000002" else digest

        restore.read_manifest = read_another
    TensorFile.blocks = lambda self, key: (read.append(len(block)) or block for block in blocks(self, key))
    try:
        with warnings.catch_warnings(record=True, action="always") as said:
            return agree_on_newest(world, folder), sum(read), [str(warning.message) for warning in said]
    finally:
        TensorFile.blocks, (restore.checkpoints, restore.read_manifest) = blocks, plain


@pytest.mark.parametrize(
    ("blind", "step"),
    [("", 2), ("lists an older one", 2), ("cannot open the newest", 1), ("has another of this name", 1)],
)
def test_every_rank_goes_on_from_the_checkpoint_that_all_can_read(tmp_path, blind, step):
    minipar.run(save_each, tmp_path, (1, 2), 0, world_size=4)
    seen = minipar.run(choose, tmp_path, blind, world_size=2)
    assert [path.name for path, *_ in seen] == [f"step-{step:08}"] * 2
    if not blind:
        assert [read for _, read, _ in seen] == [128, 128], "of 64 float32 each rank checks half"
    says = [f"checkpoint {tmp_path}/step-00000002 is damaged"] if step == 1 else []
    assert [[line.partition(" (")[0] for line in said] for *_, said in seen] == [says, []]


def test_the_trainer_takes_the_choice_of_rank_0(tmp_path):
    train(replace(BASE, checkpoint_every=2, out=tmp_path))

    def rank(world):
        if world.rank == 1:  # a shared folder of which this machine has an older view
            listed = restore.checkpoints
            restore.checkpoints = lambda folder: listed(folder)[1:]
            trainer.newest_whole = lambda folder: listed(folder)[1]
        config = replace(BASE, steps=6, dp=2, resume=tmp_path, out=tmp_path / "second")
        text, digest = load_data(config)
        return trainer._choose_start(config, TextId(digest, len(text)), world)

    first, second = minipar.run(rank, world_size=2)
    minipar.shutdown()  # the rank whose view was spoiled
    assert first == second
    assert first.step == 4


def test_a_refusal_of_rank_0_is_the_refusal_of_all():
    def refuse():
        raise ValueError("dp=3 is odd")

    def rank(world):
        try:
            decided_on_rank_0(world, refuse if world.rank == 0 else list)
        except ValueError as error:
            return str(error)

    assert minipar.run(rank, world_size=2) == ["dp=3 is odd"] * 2
    assert minipar.run(lambda world: decided_on_rank_0(world, lambda: world.rank), world_size=2) == [0, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(seed=1), "seed is 0 on rank 0, and 1 on rank 1"),
        (dict(zero=1), "zero is 0 on rank 0, and 1 on rank 1"),
        (
            dict(model=replace(BASE.model, norm_eps=1e-6)),
            "model.norm_eps is 1e-05 on rank 0, and 1e-06 on rank 1",
        ),
        (dict(compress="int8"), "compress is none on rank 0, and int8 on rank 1"),
    ],
)
def test_ranks_started_with_other_settings_are_named(changes, said):
    def rank(world):
        config = BASE if world.rank == 0 else BASE.choosing(**changes)
        with pytest.raises(ValueError, match=f"^the ranks' settings differ: {said}; start every rank by the"):
            require_same_start(world, config, TextId("digest", 100))

    minipar.run(rank, world_size=2)


def test_ranks_of_other_versions_are_named(monkeypatch):
    def rank(world):
        import_module("minipar.train.resume").version = lambda name: f"{name} {world.rank}"
        require_same_start(world, BASE, TextId("digest", 100))

    with pytest.raises(
        minipar.RankError, match="version of minipar is minipar 0 on rank 0, and minipar 1 on ran"
    ):
        minipar.run(rank, world_size=2)


def test_ranks_that_have_read_different_texts_say_so():
    def rank(world, digests):
        config = replace(BASE, text=f"/disk{world.rank}/text")
        require_same_start(world, config, TextId(digests[world.rank], 100))

    with pytest.raises(
        minipar.RankError, match="text is of checksum a on rank 0, and of checksum b on rank 1"
    ):
        minipar.run(rank, "ab", world_size=2)
    minipar.run(rank, "aa", world_size=2)


def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path):
    def rank(world):
        own = tmp_path / str(world.rank)
        own.mkdir()
        with pytest.raises(
            ValueError, match=r"^out=.*: rank 1 does not see what rank 0 writes there; use a fold"
        ):
            require_shared(world, own)
        require_shared(world, tmp_path)

    minipar.run(rank, world_size=2)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1"]


def test_an_earlier_run_without_checkpoints_is_set_aside(tmp_path, capfd):
    runs = [replace(BASE, steps=steps, out=tmp_path) for steps in (1, 2, 3)]
    for run in runs:
        train(run)
    assert "had the files of an earlier run, which are now in" in capfd.readouterr().err
    earlier = [tmp_path / "earlier-1", tmp_path / "earlier-2", tmp_path]
    assert [len(read_metrics(folder)) for folder in earlier] == [1, 2, 3]
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {path.name for path in earlier[0].iterdir()}


@pytest.mark.parametrize("every", [3, 2])
def test_a_run_that_is_asked_to_stop_is_saved_and_goes_on_from_there(tmp_path, every):
    config = replace(BASE, dp=2, checkpoint_every=every, out=tmp_path)
    asked = []

    def stop():
        asked.append(len(asked) + 1)
        return len(asked) == 2

    with pytest.raises(
        Stopped, match=f"^stopped and saved after step 2; go on with --resume {tmp_path} --out"
    ):
        train(config, stop=stop)
    assert asked == [1, 2]
    assert newest_whole(tmp_path / "checkpoints").name == "step-00000002"
    train(replace(config, resume=tmp_path))
    whole = train(replace(config, out=tmp_path / "whole"))
    found = [line["loss"] for line in read_metrics(tmp_path)]
    assert found == [line["loss"] for line in whole.metrics]


def test_a_save_under_way_ends_before_a_step_that_is_not_finite(tmp_path):
    config = replace(BASE, out=tmp_path, checkpoint_every=1, lr=1e300, warmup=0, dtype="float64")
    with pytest.raises(minipar.RankError, match="NotFinite"):
        train(config)
    assert newest_whole(tmp_path / "checkpoints").name == "step-00000001"


def test_a_run_without_checkpoints_is_not_asked_to_stop(tmp_path):
    def stop():
        raise AssertionError("asked")

    assert len(train(replace(BASE, steps=2, out=tmp_path), stop=stop).metrics) == 2


def contents(folder) -> dict:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.thorough
def test_a_folder_of_unreadable_checkpoints_is_left_unchanged(tmp_path):
    train(replace(BASE, checkpoint_every=2, out=tmp_path))
    for path in checkpoints(tmp_path / "checkpoints"):
        damage_bit(path / "rank-00000.safetensors")
    before = contents(tmp_path)
    for out in (tmp_path, tmp_path / "other"):
        with (
            pytest.warns(UserWarning, match="is damaged"),
            pytest.raises(ValueError, match="none of its 2 checkpoints can be read .*nothing was changed"),
        ):
            train(replace(BASE, steps=6, checkpoint_every=2, out=out, resume=tmp_path))
    assert contents(tmp_path) == before
    assert not (tmp_path / "other").exists()


def test_a_run_without_checkpoints_leaves_anothers_files_alone(tmp_path):
    train(replace(BASE, checkpoint_every=2, out=tmp_path))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="has checkpoints of an earlier run"):
        train(replace(BASE, steps=3, out=tmp_path))
    assert contents(tmp_path) == before


def test_a_resumed_run_in_a_new_folder_logs_only_its_own_lines(tmp_path):
    train(replace(BASE, checkpoint_every=2, out=tmp_path / "first"))
    train(replace(BASE, out=tmp_path / "second"))
    train(replace(BASE, steps=6, resume=tmp_path / "first", out=tmp_path / "second"))
    assert [line["step"] for line in read_metrics(tmp_path / "second")] == [4, 5]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path):
    (tmp_path / "checkpoints").write_text("not a folder, and listing it fails as that of a broken disk does")
    with pytest.raises(ValueError, match="checkpoints cannot be listed: Not a directory"):
        train(replace(BASE, checkpoint_every=2, out=tmp_path, resume=tmp_path))


def test_scaled_wavelengths_are_those_of_the_run_that_goes_on(tmp_path):
    run = replace(BASE, model=replace(BASE.model, rope_scaling=(8.0, 1.0, 4.0, 16.0)), checkpoint_every=2)
    train(replace(run, out=tmp_path / "first"))
    train(replace(run, steps=run.steps + 1, resume=tmp_path / "first", out=tmp_path / "second"))


@pytest.mark.thorough
def test_the_last_step_is_saved_and_resuming_says_what_changed(tmp_path, capfd):
    train(replace(BASE, steps=3, checkpoint_every=2, out=tmp_path / "first"))
    path = newest_whole(tmp_path / "first" / "checkpoints")
    assert path.name == "step-00000003"
    again = replace(BASE, steps=3, resume=tmp_path / "first", out=tmp_path / "second")
    capfd.readouterr()
    train(replace(again, steps=4))
    assert capfd.readouterr().err.splitlines() == [f"going on from {path} with steps=4 (was 3)"]
    train(replace(again, steps=4, lr=0.01, dp=2, zero=1, out=tmp_path / "third"))
    changes = "dp=2 (was 1), zero=1 (was 0), steps=4 (was 3), lr=0.01 (was 0.005)"
    assert capfd.readouterr().err.splitlines() == [f"going on from {path} with {changes}"]


def test_a_run_on_another_text_batch_or_sample_is_not_continued(tmp_path):
    train(replace(BASE, checkpoint_every=2, out=tmp_path / "first"))
    (tmp_path / "text").write_text("other words " * 100)
    other = replace(BASE, steps=6, resume=tmp_path / "first", out=tmp_path / "second")
    for wrong, says in [
        (dict(batch_size=8), "batch_size=8, but .* with batch_size=4; use that"),
        (dict(seq_len=8), "seq_len=8, but .* with seq_len=16; use that"),
        (dict(text=tmp_path / "text"), "text, but .* on a text with other bytes; use that text"),
        (dict(eval_every=2), "eval_every=2, but .* trained on all of its text; use eval_every=0"),
    ]:
        with pytest.raises(ValueError, match=says):
            train(replace(other, **wrong))
    assert not (tmp_path / "second").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(("there", "here"), [(0, 1), (0, 2), (0, 3), (1, 0), (1, 3), (3, 1)])
def test_a_bfloat16_run_goes_on_under_another_zero_stage(tmp_path, there, here):
    run = replace(BASE, dtype="bfloat16", dp=2)
    first = train(replace(run, zero=there, checkpoint_every=2, out=tmp_path / "first"))
    second = train(replace(run, zero=here, steps=6, resume=tmp_path / "first", out=tmp_path / "second"))
    assert [line["step"] for line in second.metrics] == [4, 5]
    assert all(line["loss"] < first.metrics[0]["loss"] for line in second.metrics)


def test_held_out_text_is_not_trained_on(tmp_path, monkeypatch):
    class Started(Exception):
        pass

    def started(fn, config, text, held_out, *args, **kwargs):
        raise Started(text, held_out)

    monkeypatch.setattr(trainer, "run", started)
    (tmp_path / "text").write_bytes(random.Random(0).randbytes(4000))  # no two places in it are alike
    with pytest.raises(Started) as caught:
        train(replace(BASE, eval_every=2, text=tmp_path / "text", out=tmp_path / "run"))
    text, held_out = (bytes(x[torch.arange(len(x))].tolist()) for x in caught.value.args)
    assert (len(text), len(held_out)) == (3800, 200)
    assert not any(held_out[at : at + 8] in text for at in range(len(held_out) - 8))
