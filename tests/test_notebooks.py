"""The plugin that runs the lessons: one kernel for several notebooks, and a fault in one of them is seen."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
CELLS = {
    "a": "x = 3",
    "b": "assert 'x' not in globals()\nimport pathlib\nassert pathlib.Path('a.ipynb').exists()",
    "c": "assert 1 == 2, 'not equal'",
    "d": "import os\nos._exit(3)",
    "e": "import minipar\nassert minipar.run(lambda world: world.rank, world_size=2) == [0, 1]",
}


@pytest.mark.thorough
def test_each_notebook_begins_anew_and_one_that_fails_or_dies_is_red(tmp_path):
    for name, source in CELLS.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.notebooks", "-p", "no:cacheprovider", "-rA", tmp_path],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    passed = [name for name in CELLS if f"PASSED {tmp_path}/{name}" in done.stdout.replace("../", "/")]
    assert "2 failed, 3 passed" in done.stdout, done.stdout
    assert "not equal" in done.stdout
    assert "Kernel died" in done.stdout
    assert passed == [] or passed == ["a", "b", "e"]
