"""What `make test-gpu` prints and writes, from results that no GPU has given."""

from types import SimpleNamespace

from minipar.runtime.devices import Machine
from tests.gpu.__main__ import main
from tests.gpu.layouts import layouts, worlds
from tests.gpu.report import Collector, page, table

RANK = {"seconds": 0.010, "peak_bytes": 2**20, "hidden": 0.5, "host_waits": 1}
SLOW = {"seconds": 0.012, "peak_bytes": 3 * 2**20, "hidden": 0.7, "host_waits": 1}


def report(outcome, **properties):
    return SimpleNamespace(
        when="call",
        nodeid=f"test[{len(properties)}-{outcome}]",
        outcome=outcome,
        user_properties=list(properties.items()),
    )


def collected():
    found = Collector()
    found.pytest_runtest_logreport(report("passed", verified=["nccl", "DDP", 2, "float64", 1.23e-16]))
    found.pytest_runtest_logreport(report("failed", verified=["nccl", "DDP", 2, "bfloat16", 0.5], other=1))
    found.pytest_runtest_logreport(
        report("passed", stepped=["nccl", "DDP", 2, [RANK, SLOW]], other=1, more=2)
    )
    found.pytest_runtest_logreport(
        report("passed", verified=["nccl", "TP", 1, "float32", 0.0], a=1, b=2, c=3)
    )
    found.pytest_runtest_logreport(
        report("passed", verified=["gloo", "DDP", 4, "float64", 0.0], a=1, b=2, c=3, d=4)
    )
    found.pytest_runtest_logreport(
        SimpleNamespace(when="setup", nodeid="x", outcome="skipped", user_properties=[])
    )
    return found


def test_each_row_has_a_strategys_nccl_numbers_by_rank_count():
    assert table(collected())[2:] == [
        "| TP | 1 |  | 0e+00 |  |  |  |  |",
        "| DDP | 2 | 1e-16 |  | 5e-01 | 12.0 ms | 3 MB | 60% |",
    ]


def test_the_page_says_what_it_was_measured_on_and_what_failed():
    text = page(collected(), {"date": "2026-01-01", "GPUs": "2 x H100", "driver": "580", "NCCL": "2.30.1"})
    for line in ("- date: 2026-01-01", "- GPUs: 2 x H100", "- driver: 580", "- tests: 4 passed, 1 failed"):
        assert line in text.splitlines()
    assert "- failed: `test[2-failed]`" in text


def test_without_a_gpu_the_report_says_so_and_writes_nothing(tmp_path, capsys):
    def never(*args, **options):
        raise AssertionError("tests were run")

    assert main(Machine(0, None, False), never, tmp_path / "gpu.md") == 0
    assert (
        capsys.readouterr().out == "no GPU test was run: NCCL needs a GPU, and torch finds none; use gloo\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_run_writes_the_page_and_returns_pytests_status(tmp_path, capsys, monkeypatch):
    def run(arguments, plugins):
        plugins[0].__dict__.update(collected().__dict__)
        assert arguments[:2] == ["-m", "nccl"]
        return 1

    monkeypatch.setattr("tests.gpu.__main__.facts", lambda machine: {"date": "2026-01-01"})
    assert main(Machine(2, (2, 28, 3), False), run, tmp_path / "gpu.md") == 1
    assert (tmp_path / "gpu.md").read_text().startswith("# minipar on GPUs")
    assert "| DDP | 2 | 1e-16 |" in capsys.readouterr().out


def test_a_run_in_which_no_gpu_took_part_leaves_the_page_alone(tmp_path):
    assert main(Machine(1, (2, 28, 3), False), lambda *args, **options: 5, tmp_path / "gpu.md") == 5
    assert list(tmp_path.iterdir()) == []


def test_worlds_go_as_far_as_nccl_does():
    assert worlds(Machine(0, None, False)) == []
    assert worlds(Machine(1, (2, 28, 3), True)) == [1]
    assert worlds(Machine(4, (2, 28, 3), False)) == [1, 2, 4]
    assert worlds(Machine(1, (2, 30, 0), True)) == [1, 2, 4, 8]


def test_every_axis_and_stage_is_among_the_layouts_of_eight_ranks():
    configs = layouts(8).values()
    for axis in ("pp", "dp", "cp", "tp", "ep"):
        assert any(getattr(config, axis) > 1 for config in configs)
    assert {config.zero for config in configs} == {0, 1, 2, 3}
    assert all(config.world_size == 8 for config in configs)
    assert layouts(1).keys() >= {"DDP", "FSDP"}
