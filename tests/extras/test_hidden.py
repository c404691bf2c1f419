"""Without any one extra, all else works: imports, choices, help and plans. Without all of them, training works too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minipar

PACKAGE = Path(minipar.__file__).parent
EXTRAS = sorted(path.parent.name for path in (PACKAGE / "extras").glob("*/__init__.py"))

# For each argument, a few extras joined by "+": check a copy of minipar without them, in a process in which torch has been
# imported, and write what went wrong, if anything, to a file named by the argument.
PROGRAM = """
import contextlib, importlib, io, os, pathlib, sys, traceback
import torch

root = pathlib.Path("minipar").absolute()

def check(hidden):
    import minipar

    assert root == pathlib.Path(minipar.__file__).parent
    assert not any((root / "extras" / name).exists() for name in hidden)
    removed = tuple(f"minipar.extras.{name}." for name in hidden)
    for file in sorted(root.rglob("*.py")):
        name = ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        if not {"stubs", "visualize"} & set(file.parts) and file.stem != "__main__":
            importlib.import_module(name)

    from minipar.config.choices import CHOSEN
    from minipar.support.registry import _installed
    for (kind, name), found in _installed().items():
        brought_by_it = found[0].entry.module.startswith(removed)
        if kind in CHOSEN:
            assert (name in CHOSEN[kind]) != brought_by_it, (kind, name)
            if brought_by_it:
                try:
                    CHOSEN[kind][name]
                except ValueError as error:
                    assert "minipar.extras." in str(error) and "\\n" not in str(error), error
                    assert any(extra in f"{error}." for extra in removed), error
                else:
                    raise AssertionError(f"{kind}={name} is gone, and was found")

    if len(hidden) > 1:
        from minipar.train.verification.verify import table, verify
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
        if kind == "instead" and found[0].entry.module.startswith(removed):
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said):
                    main(["train", "--" + name.replace("_", "-")])
            except SystemExit as end:
                assert end.code == 2
            assert "No module named 'minipar.extras." in said.getvalue(), said.getvalue()
            assert said.getvalue().count("\\n") == 1

def write_what_goes_wrong(argument):
    wrong, printed = "", io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            check(argument.split("+"))
        assert "llama-7b" in printed.getvalue()
    except BaseException:
        wrong = traceback.format_exc()
    pathlib.Path(argument).write_text(wrong)

for argument in sys.argv[1:]:
    folders = [(root / "extras" / name, pathlib.Path("removed", name)) for name in argument.split("+")]
    for folder, away in folders:
        folder.rename(away)
    child = os.fork()
    if child == 0:
        write_what_goes_wrong(argument)
        os._exit(0)
    os.waitpid(child, 0)
    for folder, away in folders:
        away.rename(folder)
"""


def test_every_extra_is_hidden_in_turn():
    assert (
        sorted(path.name for path in (PACKAGE / "extras").iterdir() if path.is_dir() and path.name[0] != "_")
        == EXTRAS
    )
    assert len(EXTRAS) > 5


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The folder with what went wrong without each extra, and without all."""
    folder = tmp_path_factory.mktemp("checked")
    # With the bytecode, but for what is being written.
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("*.pyc.*"))
    (folder / "removed").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *EXTRAS, "+".join(EXTRAS)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("hidden", [*EXTRAS, "+".join(EXTRAS)], ids=[*EXTRAS, "all"])
def test_without_an_extra_everything_else_works(hidden, checked):
    assert (checked / hidden).read_text() == ""
