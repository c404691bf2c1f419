"""With the folder of any extra removed, everything else works: imports, help, plans, and a verified training step."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minipar

PACKAGE = Path(minipar.__file__).parent
EXTRAS = sorted(path.parent.name for path in (PACKAGE / "extras").glob("*/__init__.py"))

PROGRAM = """
import contextlib, importlib, io, pathlib, sys
import minipar

hidden, root = sys.argv[1], pathlib.Path(minipar.__file__).parent
assert not (root / "extras" / hidden).exists()
for file in sorted(root.rglob("*.py")):
    name = ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
    if "stubs" not in file.parts and file.stem != "__main__":
        importlib.import_module(name)

from minipar.config.choices import CHOSEN
from minipar.support.registry import _installed
for (kind, name), found in _installed().items():
    brought_by_it = found[0].entry.module.startswith(f"minipar.extras.{hidden}.")
    if kind in CHOSEN:
        assert (name in CHOSEN[kind]) != brought_by_it, (kind, name)
        if brought_by_it:
            try:
                CHOSEN[kind][name]
            except ValueError as error:
                assert f"minipar.extras.{hidden}" in str(error) and "\\n" not in str(error), error
            else:
                raise AssertionError(f"{kind}={name} is gone, and was found")

from minipar.verification.verify import table, verify
result = verify(minipar.config.VERIFY_DEFAULTS.choosing(dp=2, pp=2, microbatches=2, zero=1, steps=1))
assert result.equal, table(result)
minipar.shutdown()

from minipar.cli import main
main(["plan", "--model", "llama-7b", "--gpus", "8", "--machine", "h100", "--batch", "8", "--top", "2"])
try:
    main(["train", "--help"])
except SystemExit as end:
    assert not end.code

for (kind, name), found in _installed().items():
    if kind == "instead" and found[0].entry.module.startswith(f"minipar.extras.{hidden}."):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                main(["train", "--" + name.replace("_", "-")])
        except SystemExit as end:
            assert end.code == 2
        assert f"No module named 'minipar.extras.{hidden}'" in said.getvalue(), said.getvalue()
        assert said.getvalue().count("\\n") == 1
"""


def test_every_extra_is_hidden_in_turn():
    assert (
        sorted(path.name for path in (PACKAGE / "extras").iterdir() if path.is_dir() and path.name[0] != "_")
        == EXTRAS
    )
    assert len(EXTRAS) > 5


@pytest.mark.thorough
@pytest.mark.parametrize("hidden", EXTRAS)
def test_without_an_extra_everything_else_works(hidden, tmp_path):
    copy = tmp_path / "minipar"
    shutil.copytree(PACKAGE, copy)  # with its bytecode
    shutil.rmtree(copy / "extras" / hidden)
    shutil.copytree(PACKAGE.parent / "visualize", tmp_path / "visualize")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, hidden], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "llama-7b" in done.stdout
