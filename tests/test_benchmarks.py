"""How the benchmarks turn times into figures; the times themselves are no test's business."""

import json
from itertools import islice

import pytest
import torch

import benchmarks
from benchmarks import checkpoints, context, harness, on_gpu, training
from benchmarks.collectives import line, with_bus_bandwidth
from benchmarks.harness import Row, print_table, row
from benchmarks.peers import nanogpt, picotron
from minipar.config.model_config import ModelConfig
from minipar.cost.machines import find_machine
from minipar.train.data.text import batch_of, load_data


def test_a_round_takes_as_long_as_on_its_slowest_rank():
    rank_0, rank_1 = [(1.0, 2.0), (4.0, 2.0), (1.0, 1.0)], [(2.0, 1.0), (3.0, 1.0), (3.0, 1.0)]
    r = row("x", [rank_0, rank_1], bar=1.5, note="note")
    # rounds: (2, 2), (4, 2), (3, 1)
    assert r[:5] == ("x", 3.0, 2.0, 2.0, 1.5)
    assert r.note == "1.00..3.00  note"


def test_a_table_marks_what_is_over_its_bar(capsys):
    print_table(
        "Title", [Row("fast", 1e-3, 2e-3, 0.5, 1.0), Row("slow", 2e-3, 1e-3, 2.0, 1.0), Row("?", 1, 1, 1)]
    )
    lines = capsys.readouterr().out.splitlines()
    assert ["over" in line for line in lines[-3:]] == [False, True, False]
    assert "1.00 ms" in lines[3]


def test_a_line_is_recovered_from_points_on_it():
    alpha_s, beta_s = line({n: 1e-4 + n * 2e-9 for n in (1000, 10_000, 10_000_000)})
    assert alpha_s == pytest.approx(1e-4)
    assert beta_s == pytest.approx(2e-9)


def test_a_rank_s_memory_is_that_of_the_rank_with_most(capsys):
    usages = [
        checkpoints.Usage(1.0, 2_000_000, 3_000_000, 0, 5),
        checkpoints.Usage(2.0, 1_000_000, 4_000_000, 9, 0),
    ]
    line = checkpoints.row("build", usages)
    assert line == checkpoints.Row("build", 2.0, 2_000_000, 4_000_000, 9, 5)
    checkpoints.print_table("Title", [line])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["build", "2", "4", "0", "0", "2.0"]


def test_an_unknown_benchmark_is_refused():
    with pytest.raises(ValueError, match="'nothing' is no benchmark; use collectives"):
        benchmarks.run(["nothing"])


def test_bus_bandwidth_is_the_bytes_that_must_be_sent_over_the_time():
    note = with_bus_bandwidth(Row("x", 1e-3, 2e-3, 0.5, None, "1..2"), 4, 10**6).note
    assert note == "1..2  bus 1.50 GB/s against 0.75"  # 2 * 3/4 of 1 MB


def test_a_gpu_benchmark_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(benchmarks.Machine, "here", classmethod(lambda cls: cls(0, None, False)))
    with pytest.raises(ValueError, match="device='cuda': NCCL needs a GPU"):
        benchmarks.run(["collectives"], device="cuda")
    with pytest.raises(ValueError, match="device='tpu' is unknown; use cpu or cuda"):
        benchmarks.run(["collectives"], device="tpu")


def test_gpu_worlds_are_those_that_nccl_can_serve(monkeypatch):
    monkeypatch.setattr(benchmarks.Machine, "here", classmethod(lambda cls: cls(4, (2, 28, 3), False)))
    assert harness.worlds() == [2, 4]
    device = harness._device.set("cuda")
    assert harness.worlds() == [2, 4]
    monkeypatch.setattr(benchmarks.Machine, "here", classmethod(lambda cls: cls(1, (2, 30, 0), True)))
    assert harness.worlds() == [2, 4, 8]
    harness._device.reset(device)


def test_what_a_gpu_is_to_run_works_on_a_cpu(monkeypatch):
    """Tiny, and on two ranks at most: that the code runs is the claim, not what it takes."""
    monkeypatch.setattr(training, "SMALL", ModelConfig(dim=16, num_layers=1, num_heads=2, max_seq_len=16))
    monkeypatch.setattr(training, "worlds", lambda: [2])
    alone, together = training.rows(quick=True)
    assert "TFLOP/s a rank" in alone.note
    assert "communication hidden" in together.note
    tiled, auto = context._fused_rows(64, 1)
    assert tiled.ours_s > 0 < auto.ours_s


@pytest.mark.parametrize(
    ("gpu", "words"), [("NVIDIA H100 80GB HBM3", "MFU 50.0% of NVIDIA H100"), ("RTX", ""), (None, "")]
)
def test_the_mfu_is_of_the_gpus_own_peak(gpu, words):
    peak = find_machine("h100").peak_flops / 1e12
    assert words in training._mfu(peak / 2, gpu)
    assert bool(training._mfu(peak / 2, gpu)) == bool(words)


def test_a_folder_that_is_not_the_program_s_is_refused(tmp_path):
    for program in (nanogpt, picotron):
        with pytest.raises(ValueError, match=f"{tmp_path} is no checkout of"):
            next(program.rows(tmp_path))


@pytest.mark.parametrize("mesh", picotron.MESHES)
def test_picotron_s_ranks_get_every_token_once_as_ours_do(mesh):
    config = picotron.config_of(mesh)
    text, found = load_data(config)[0], {}
    for dp_rank in range(config.dp):
        for cp_rank in range(config.cp):
            parts = list(
                islice(picotron._microbatches(config, text, dp_rank, cp_rank), 2 * config.microbatches)
            )
            tokens = torch.cat([part["input_ids"] for part in parts[config.microbatches :]])
            assert all(torch.equal(p["input_ids"][:, 1:], p["target_ids"][:, :-1]) for p in parts)
            found.setdefault(dp_rank, []).append(tokens)
    whole = torch.cat([torch.cat(found[r], dim=1) for r in range(config.dp)])
    assert torch.equal(whole, batch_of(config, text, 1).tokens)


def test_a_gpu_s_page_tells_what_failed_and_has_the_other_figures(tmp_path, monkeypatch):
    def breaks(gpu):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(on_gpu.SECTIONS, "launches", breaks)
    assert on_gpu.main(("launches", "beside"), device="cpu", out=tmp_path) == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "failed: out of memory" in page
    assert "| copy to the host |" in page
    assert len(json.loads((tmp_path / "generated" / "gpu.json").read_text())["beside"]) == 4


def test_without_a_gpu_nothing_is_measured_or_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu.devices.Machine, "here", lambda: on_gpu.devices.Machine(0, None, False))
    assert on_gpu.main(out=tmp_path / "docs") == 0
    assert "nothing was measured: NCCL needs a GPU" in capsys.readouterr().out
    assert not (tmp_path / "docs").exists()
