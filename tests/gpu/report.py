"""The results of a run on GPUs as a table by strategy and number of ranks, and the page they are written to."""

from __future__ import annotations

import platform
from collections import defaultdict
from datetime import date
from pathlib import Path

import torch

from minipar.runtime.devices import Machine


class Collector:
    """A pytest plugin that keeps what the tests record, and which tests failed."""

    def __init__(self):
        self.verified: list[list] = []  # backend, strategy, ranks, dtype, largest difference from one process
        self.stepped: list[list] = []  # backend, strategy, ranks, what each rank measured
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when != "call":
            return
        self.outcomes[report.nodeid] = report.outcome
        for name, value in report.user_properties:
            if name in ("verified", "stepped"):
                getattr(self, name).append(value)

    @property
    def ran_on_gpu(self) -> bool:
        return any(row[0] == "nccl" for row in (*self.verified, *self.stepped))


def facts(machine: Machine) -> dict[str, str]:
    """What the numbers depend on: the date, the GPUs, the driver and the versions."""
    found = {"date": date.today().isoformat(), "system": platform.platform(), "torch": torch.__version__}
    found["NCCL"] = ".".join(map(str, machine.nccl or ("none",)))
    if machine.num_gpus:
        found["GPUs"] = f"{machine.num_gpus} x {torch.cuda.get_device_name(0)}"
        found["CUDA"] = str(torch.version.cuda)
        found["driver"] = driver_version()
    return found


def driver_version() -> str:
    """The version of the GPU's driver, as Linux states it."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0].removeprefix("NVRM version: ") if file.exists() else "unknown"


def table(found: Collector) -> list[str]:
    """Lines of Markdown: a row per strategy and number of ranks on GPUs."""
    rows: dict[tuple, dict] = defaultdict(dict)
    for backend, strategy, ranks, dtype, difference in found.verified:
        if backend == "nccl":
            rows[strategy, ranks][dtype] = f"{difference:.0e}"
    for backend, strategy, ranks, by_rank in found.stepped:
        if backend == "nccl":
            rows[strategy, ranks] |= _measured(by_rank)
    columns = ["float64", "float32", "bfloat16", "step", "peak memory", "hidden"]
    lines = [
        "| strategy | ranks | " + " | ".join(columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for (strategy, ranks), row in sorted(rows.items(), key=lambda item: (item[0][1], item[0][0])):
        lines.append(f"| {strategy} | {ranks} | " + " | ".join(row.get(c, "") for c in columns) + " |")
    return lines


def _measured(by_rank: list[dict]) -> dict[str, str]:
    slowest, largest = (max(rank[name] for rank in by_rank) for name in ("seconds", "peak_bytes"))
    hidden = sum(rank["hidden"] for rank in by_rank) / len(by_rank)
    return {
        "step": f"{1e3 * slowest:.1f} ms",
        "peak memory": f"{largest / 2**20:.0f} MB",
        "hidden": f"{hidden:.0%}",
    }


def page(found: Collector, about: dict[str, str]) -> str:
    """The report as Markdown."""
    failed = sorted(test for test, outcome in found.outcomes.items() if outcome == "failed")
    passed = sum(outcome == "passed" for outcome in found.outcomes.values())
    lines = ["# minipar on GPUs", "", "Written by `make test-gpu`.", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [f"- tests: {passed} passed, {len(failed)} failed", ""]
    lines += [f"- failed: `{test}`" for test in failed] + [""] * bool(failed)
    lines += [
        "Largest difference from one process (in half precision, on the CPU), relative to a tensor's largest entry; then a "
        "training step of a small model, its peak memory on a rank, and how much of its communication computing hides.",
        "",
        *table(found),
    ]
    return "\n".join(lines) + "\n"
