"""Write the pages of this package: `python -m benchmarks.guide docs/generated`. Planning takes minutes."""

import sys
from pathlib import Path

from benchmarks.guide import foreign, routing, strategies, tuning, workloads

PAGES = {
    "strategies.md": strategies.page,
    "workloads.md": workloads.page,
    "tuning.md": tuning.page,
    "routing.md": routing.page,
    "foreign_code.md": foreign.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page(), encoding="utf-8")
        print(f"wrote {Path(sys.argv[1]) / name}")
