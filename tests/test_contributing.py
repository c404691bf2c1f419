"""The pages docs/guide/add-*.md work: their blocks are applied to a copy of the checkout, where their commands are run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "guide").iterdir())}
COPIED = (
    "minipar", "visualize", "benchmarks", "tests", "lessons", "docs", "website", "pyproject.toml", "README.md", "Makefile",
)  # fmt: skip
WHERE = r"(New file|At the end of|In) (`+)(.+?)\2(?:, after the line (`+)(.+?)\4)?:\n\n"
BLOCK = re.compile(rf"^{WHERE}(`{{3,4}})\w*\n(.*?)^\6$", re.M | re.S)
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
RUNS = {
    "minipar": (sys.executable, "-m", "minipar"),
    "pytest": (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
    "python": (sys.executable,),
    "jupyter": (sys.executable, "-m", "jupyter"),
}


def apply(text: str, folder: Path) -> int:
    """Apply the blocks of a text to the files in a folder; return how many there are."""
    blocks = BLOCK.findall(text)
    for action, _, path, _, line, _, block in blocks:
        file = folder / path
        if action == "New file":
            assert not file.exists(), path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block)
        elif action == "At the end of":
            block = block.lstrip("\n")
            blank = 2 if block.startswith(("def ", "class ", "@")) else block.startswith("[[")
            file.write_text(file.read_text() + "\n" * blank + block)
        else:
            before = file.read_text()
            assert before.count(f"\n{line}\n") == 1, f"{path} has no such line: {line}"
            file.write_text(before.replace(f"\n{line}\n", f"\n{line}\n{block}"))
    return len(blocks)


def install(project: Path, module: Path, packages: Path) -> None:
    """Make the metadata that pip would make of a pyproject.toml, so that its entry points are found."""
    told = tomllib.loads(project.read_text())["project"]
    info = packages / f"{told['name'].replace('-', '_')}-{told['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n"
    )
    points = told["entry-points"]["minipar.extras"]
    lines = [f"{name} = {place}\n" for name, place in points.items()]
    (info / "entry_points.txt").write_text("[minipar.extras]\n" + "".join(lines))
    (packages / module.name).symlink_to(module)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout with everything that the pages add, installed."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".*")
            )
        else:
            shutil.copy(source, folder)
    counts = {name: apply(text, folder) for name, text in PAGES.items()}
    assert all(counts.values()), counts
    packages = folder / "installed"
    install(folder / "pyproject.toml", folder / "minipar", packages)
    extra = folder / "half-gradients"
    install(extra / "pyproject.toml", extra / "half_gradients", packages)
    return folder


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder / "installed"), str(folder), os.environ.get("PYTHONPATH", "")])
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PATH": commands, "COLUMNS": "100"}


def run(line: str, folder: Path) -> str:
    """Run a command of a page in the copy; return what it prints."""
    name, *words = shlex.split(line)
    done = subprocess.run(
        [*RUNS[name], *words], cwd=folder, env=environment(folder), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_every_block_has_a_place_or_is_a_command(name):
    fences = len(re.findall(r"^`{3,4}\w*$", PAGES[name], re.M))
    assert fences == 2 * (len(BLOCK.findall(PAGES[name])) + 1)


def test_contributing_is_a_page_and_leads_to_all_guides():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(page.split()) <= 600
    assert {name for name in PAGES if f"(docs/guide/{name}.md)" not in page} == set()


@pytest.mark.thorough
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_guide_run(name, checkout):
    (commands,) = COMMANDS.findall(PAGES[name])
    for line in commands.splitlines():
        run(line, checkout)


@pytest.mark.thorough
def test_what_is_added_keeps_the_rules_of_the_house(checkout):
    """Maps, imports, the list of extras, the linter: what `make test` holds every file to."""
    run(
        "pytest tests/test_architecture.py tests/extras/test_registered.py -k 'one_shot or eager or map'",
        checkout,
    )
    run("pytest tests/test_extras_page.py -k 'table or folder'", checkout)
    run("pytest tests/cost/test_plan_command.py tests/cost/test_planner.py -k planned", checkout)
    text = "\n".join(PAGES.values())
    added = re.findall(r"^New file `((?:minipar|tests)/.+?\.py)`", text, re.M)
    changed = re.findall(r"^(?:At the end of|In) `(.+?\.py)`", text, re.M)
    ruff = (sys.executable, "-m", "ruff")
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [*ruff, *words, "--quiet", *added, *changed], cwd=checkout, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
