"""What the wheel and the source distribution contain: every file that the package reads, and all that the tests need."""

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tracked():
    """Return every file of the repository, as a path from its root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    return [Path(line) for line in listed.stdout.splitlines()]


def test_the_description_has_no_link_to_a_file():
    """A package index shows it where no file of the checkout lies."""
    command = [sys.executable, "setup.py", "--quiet", "--long-description"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "One model, one seed, one batch" in text
    assert "draws this picture" not in text
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []


def test_the_wheel_installs_minipar_alone():
    """The folder `visualize` lies beside `minipar`, and is installed inside it: another project has its name."""
    where = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = find_packages(str(ROOT), include=where["include"])
    assert {name.split(".")[0] for name in packages} == {"minipar"}
    assert {"minipar.comm", "minipar.visualize", "minipar.extras.schedules"} <= set(packages)


def test_the_wheel_has_every_data_file_of_the_package(tracked):
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {"minipar", "visualize"}  # and a link from one to the other
    files = [
        p for p in tracked if p.parts[0] in folders and p.suffix != ".py" and not (ROOT / p).is_symlink()
    ]
    assert files
    for path in files:
        package = ".".join(path.parent.parts)
        patterns = data["*"] + data.get(package, [])
        assert any(fnmatch(path.name, pattern) for pattern in patterns), f"{path} is missing from the wheel"


def test_the_source_distribution_has_every_folder_that_the_tests_read(tracked):
    manifest = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    folders = {words[1] for words in manifest if words[0] in {"graft", "recursive-include"}}
    patterns = [pattern for words in manifest if words[0] == "include" for pattern in words[1:]]
    added_by_setuptools = {"LICENSE", "pyproject.toml", "setup.py", "MANIFEST.in"}
    for path in tracked:
        if len(path.parts) > 1:
            assert path.parts[0] in folders, f"{path} is missing from the source distribution"
        elif path.name not in added_by_setuptools:
            assert any(fnmatch(path.name, pattern) for pattern in patterns), (
                f"{path} is missing from the source distribution"
            )
