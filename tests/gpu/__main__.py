"""`make test-gpu`: the tests on GPUs, a table, and docs/generated/gpu.md. Without a GPU: one line, no failure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minipar.runtime.devices import Machine, why_not_nccl
from tests.gpu.report import Collector, facts, page, table

PAGE = Path(__file__).parent.parent.parent / "docs" / "generated" / "gpu.md"


def main(machine: Machine, run=pytest.main, path: Path = PAGE) -> int:
    """Run the tests marked `nccl`, print the table and write the page. Return the exit code."""
    if why := why_not_nccl(1, machine):
        print(f"no GPU test was run: NCCL {why}")
        return 0
    found = Collector()
    code = run(["-m", "nccl", "-q", str(Path(__file__).parent.parent)], plugins=[found])
    if found.ran_on_gpu:
        print("\n".join(table(found)))
        path.write_text(page(found, facts(machine)))
        print(f"wrote {path}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(Machine.here()))
