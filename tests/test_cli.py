"""The command line as a user meets it: one clear line for a bad request; pictures and a last line for a good one."""

import pytest

from minipar.cli import main


def outcome(capsys, *argv):
    code = 0
    try:
        main(list(argv))
    except SystemExit as error:
        code = error.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train", "--dp", "3"], "dp=3 does not divide batch_size=16"),
        (["train", "--dp", "0"], "dp=0"),
        (["train", "--dp", "1000", "--batch-size", "1000"], "1000 ranks on one machine"),
        (["train", "--dtype", "int8"], "dtype=int8"),
        (["train", "--text", "no/such/file"], "No such file"),
        (["train", "--out", "/dev/null/x"], "cannot be written"),
        (["train", "--model.num-heads", "5"], "num_heads=5 does not divide dim=128"),
        (["timeline", "--schedule", "2f2b"], "2f2b"),
        (["bench", "no-such-table"], "no-such-table"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_2(capsys, argv, says):
    code, out, err = outcome(capsys, *argv)
    assert code == 2
    assert says in err + out
    assert "Traceback" not in err + out


def test_an_unknown_flag_and_a_word_that_is_no_number_exit_2(capsys):
    for argv in (["train", "--dpp", "2"], ["train", "--dp", "two"], ["fly"], []):
        code, _, _ = outcome(capsys, *argv)
        assert code == 2, argv


def test_help_names_every_command_and_flag(capsys):
    code, out, _ = outcome(capsys, "--help")
    assert code == 0
    assert all(command in out for command in ("train", "timeline", "bench"))
    code, out, _ = outcome(capsys, "train", "--help")
    assert all(flag in out for flag in ("--dp", "--steps", "--text", "--seed", "--dtype", "--out"))


def test_train_says_how_it_went_and_where_to_look(capsys, tmp_path):
    small = [
        "--model.dim",
        "16",
        "--model.num-layers",
        "1",
        "--model.num-heads",
        "2",
        "--batch-size",
        "4",
        "--seq-len",
        "32",
    ]
    code, out, err = outcome(
        capsys, "train", "--dp", "2", "--steps", "4", "--verify-steps", "2", "--out", str(tmp_path), *small
    )
    assert code == 0, err
    assert "first 2 steps against one process: largest difference in loss" in out
    assert f"look in {tmp_path}/" in out.splitlines()[-1]
    for name in ("loss.png", "timeline.png", "trace.json", "metrics.jsonl", "sample.txt"):
        assert (tmp_path / name).stat().st_size > 0, name


def test_timeline_prints_the_grid_and_draws_it(capsys, tmp_path):
    code, out, _ = outcome(
        capsys, "timeline", "--stages", "3", "--microbatches", "4", "--out", str(tmp_path / "grid")
    )
    assert code == 0
    assert (tmp_path / "grid.png").stat().st_size > 0
    assert (tmp_path / "grid.svg").stat().st_size > 0
    assert "rank" in out
