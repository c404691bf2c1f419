"""The Makefile's installation: one line for what is missing, and nothing half installed that a second try would trust.

Run with a Python of a few lines of shell in place of the real one, so nothing is installed or fetched.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()

# A Python: `-m venv` makes another one, `-m pip` succeeds as long as nobody has written what it should fail with.
PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) exit {too_old} ;;
  *ensurepip*) exit {no_venv} ;;
  --version) echo "Python 3.9.2" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip"*) echo "$*" >> pip.log; [ ! -e fails ] || {{ echo "WARNING: a ConnectionError"; cat fails; exit 1; }} >&2 ;;
esac
"""
# An rm that is killed, with make, after the first entry of a folder: the mark of an unfinished environment, if it is there.
KILLED_RM = """#!/bin/sh
[ "$1" = -rf ] || exec /bin/rm "$@"
for path; do /bin/rm -rf "$path/installing"; done
kill -KILL 0
"""
MAKING = "making .venv: torch and other packages are fetched, which takes some minutes"


@pytest.fixture
def checkout(tmp_path):
    """A folder with the Makefile, what it depends on, and a Python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    write_python(tmp_path)
    return tmp_path


def write_python(folder: Path, too_old: int = 0, no_venv: int = 0) -> None:
    (folder / "python").write_text(PYTHON.format(too_old=too_old, no_venv=no_venv))
    (folder / "python").chmod(0o755)


def make(
    folder: Path, target: str = ".venv/installed", python: str = "./python", tools: str = ""
) -> tuple[int, list[str]]:
    """Return the exit status, and the lines printed besides make's own and MAKING. `tools` is first in PATH."""
    done = subprocess.run(
        ["make", "--no-print-directory", target, f"PYTHON={python}"],
        cwd=folder,
        env={**os.environ, "MAKEFLAGS": "", "MAKELEVEL": "0", "PATH": f"{tools}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines = done.stdout.splitlines()
    return done.returncode, [line for line in lines if not line.startswith("make: ***") and line != MAKING]


def test_a_whole_environment_is_marked_and_not_made_again(checkout):
    assert make(checkout) == (0, [])
    assert (checkout / ".venv/installed").exists()
    assert not (checkout / ".venv/installing").exists()
    assert make(checkout)[0] == 0
    assert len((checkout / "pip.log").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "target", ["demo", "test", "test-all", "site", "bench", "lint", "format", "slow", "soak", "mutate"]
)
def test_every_target_says_in_one_line_that_python_is_missing(checkout, target):
    code, lines = make(checkout, target, python="python3.99")
    assert code != 0
    assert lines == ["make needs Python 3.11 or later; python3.99 is not installed: make PYTHON=..."]
    assert not (checkout / ".venv").exists()


def test_a_whole_environment_needs_no_other_python(checkout):
    assert make(checkout)[0] == 0
    os.utime(checkout / ".venv/installed", (0, 0))  # older than pyproject.toml
    assert make(checkout, python="python3.99") == (0, [])


def test_newest_has_an_environment_without_constraints(checkout):
    assert make(checkout, "newest")[0] == 0
    assert make(checkout)[0] == 0
    newest, plain = (checkout / "pip.log").read_text().splitlines()
    assert (checkout / "build/newest/installed").exists()
    assert ("constraint" in newest, "--constraint constraints.txt" in plain) == (False, True)


def test_an_old_python_is_refused_with_its_version(checkout):
    write_python(checkout, too_old=1)
    code, lines = make(checkout)
    assert code != 0
    assert lines == ["make needs Python 3.11 or later; ./python is Python 3.9.2: make PYTHON=..."]
    assert not (checkout / ".venv").exists()


def test_a_python_without_venv_is_refused(checkout):
    write_python(checkout, no_venv=1)
    code, (line,) = make(checkout)
    assert code != 0
    assert "apt install python3-venv" in line
    assert not (checkout / ".venv").exists()


def test_a_venv_that_cannot_be_made_leaves_nothing(checkout):
    python = checkout / "python"
    python.write_text(python.read_text().replace('cp "$0"', "echo no space left >&2; false;"))
    code, (line,) = make(checkout)
    assert code != 0
    assert line == "make needs an environment, but ./python -m venv says: no space left"
    assert not (checkout / ".venv").exists()


def test_without_a_network_one_line_is_said_and_nothing_is_left(checkout):
    (checkout / "fails").write_text("ERROR: No matching distribution found for setuptools>=68\nand more\n")
    code, (line,) = make(checkout)
    assert code != 0
    assert line == (
        "make needs a package index, by network: pip says "
        "ERROR: No matching distribution found for setuptools>=68"
    )
    assert not (checkout / ".venv").exists()
    (checkout / "fails").unlink()
    assert make(checkout) == (0, [])


def test_what_a_killed_try_left_is_removed(checkout):
    left = checkout / ".venv" / "lib" / "half.py"
    left.parent.mkdir(parents=True)
    left.touch()
    (checkout / ".venv" / "installing").touch()
    assert make(checkout) == (0, [])
    assert not left.exists()


@pytest.mark.parametrize("whole", [False, True])
def test_a_removal_that_is_killed_is_finished_by_the_next_try(checkout, whole):
    """Of what a killed try left, or by `make clean`. Without the mark it would be somebody's .venv, and be kept."""
    if whole:
        assert make(checkout)[0] == 0
    left = checkout / ".venv" / "lib" / "half.py"
    left.parent.mkdir(parents=True)
    left.touch()
    if not whole:
        (checkout / ".venv" / "installing").touch()
    rm = checkout / "tools" / "rm"
    rm.parent.mkdir()
    rm.write_text(KILLED_RM)
    rm.chmod(0o755)
    assert make(checkout, "clean" if whole else ".venv/installed", tools=str(rm.parent))[0] != 0
    assert left.exists()
    assert not (checkout / ".venv/installed").exists()
    assert make(checkout) == (0, [])
    assert not left.exists()


def test_a_venv_without_a_python_is_not_filled(checkout):
    (checkout / ".venv" / "lib").mkdir(parents=True)
    code, lines = make(checkout)
    assert code != 0
    assert lines == ["make needs .venv/bin/python, which .venv has not; remove it: rm -rf .venv"]
    assert not (checkout / "pip.log").exists()


def test_it_says_before_the_long_wait_that_it_is_long(checkout):
    command = ["make", "--no-print-directory", ".venv/installed", "PYTHON=./python"]
    said = [subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout for _ in range(2)]
    assert said[0].splitlines() == [MAKING]
    assert MAKING not in said[1]


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError('<object>: Failed to establish a new "
            "connection: [Errno 111] Connection refused')': /torch/\n"
            "ERROR: Cannot install minipar because of conflicting dependencies.\n",
            "[Errno 111] Connection refused",
        ),
        ("  error: subprocess-exited-with-error\n  more\n", "  error: subprocess-exited-with-error"),
        ("Killed\n", "Killed"),
    ],
)
def test_the_line_of_pip_that_has_the_cause_is_told(checkout, said, cause):
    (checkout / "fails").write_text(said)
    assert make(checkout)[1] == [f"make needs a package index, by network: pip says {cause}"]


def test_a_failed_update_keeps_the_environment_and_is_retried(checkout):
    assert make(checkout)[0] == 0
    marker = checkout / ".venv/installed"
    os.utime(marker, (0, 0))  # older than pyproject.toml
    (checkout / "fails").write_text("ERROR: no network\n")
    assert make(checkout)[0] != 0
    assert (checkout / ".venv/bin/python").exists()
    (checkout / "fails").unlink()
    assert make(checkout) == (0, [])
    assert marker.stat().st_mtime > 0


def test_an_environment_of_ones_own_is_never_removed(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(checkout / "python", checkout / ".venv/bin/python")
    (checkout / "fails").write_text("ERROR: no network\n")
    assert make(checkout)[0] != 0
    assert (checkout / ".venv/bin/python").exists()


def test_without_the_site_s_packages_the_environment_stays_whole(checkout):
    assert make(checkout)[0] == 0
    (checkout / "fails").write_text("ERROR: no network\n")
    code, (line,) = make(checkout, "site")
    assert code != 0
    assert line.endswith("pip says ERROR: no network")
    assert (checkout / ".venv/installed").exists()
    assert not (checkout / ".venv/site-installed").exists()


def test_site_test_names_the_browser_it_needs(checkout):
    """With a PATH that has a shell's tools alone."""
    assert make(checkout)[0] == 0
    tools = checkout / "tools"
    tools.mkdir()
    for name in ("sh", "make", "rm", "mkdir", "touch", "cp", "cat", "grep", "head"):
        (tools / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["make", "site-test", "PYTHON=./python"],
        cwd=checkout, env={"PATH": str(tools)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == (
        "make site-test needs chromium and chromedriver: apt install chromium chromium-driver"
    )


def test_the_makefile_asks_for_the_python_of_pyproject():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    told = set(re.findall(r"Python (\d+\.\d+) or later", MAKEFILE))
    assert {f">={version}" for version in told} == {wanted}
    assert f"({wanted.removeprefix('>=').replace('.', ', ')})" in MAKEFILE


def test_help_lists_every_target_a_reader_may_want():
    code, lines = make(ROOT, "help")
    assert code == 0
    listed = {line.split()[0] for line in lines}
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[1].split())
    assert listed == {name for name in phony if not name.startswith("needs-")}
