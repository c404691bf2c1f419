"""`make mutate ROOM=comm`: plant small faults in a room, one at a time, and list those that its tests do not notice.

cosmic-ray makes the mutants, in a copy of the checkout. Each is tried by the room's own tests, from the cheapest file to
the dearest, until the first failure. A mutant whose tests take several times as long as without it counts as killed.

`build/mutants/ROOM.jsonl` has every mutant with its outcome, and `ROOM.txt` the diffs of the survivors. `survivors.toml`
beside this file explains mutants that no test can kill.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn
from xml.etree import ElementTree

import parso
import pytest
import torch  # noqa: F401  imported here, once, for all runs
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "mutants"

# Of cosmic-ray's operators, those whose mutants are seldom equivalent and seldom mere type errors.
OPERATORS = [
    "NumberReplacer",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
    *(f"ReplaceUnaryOperator_Delete_{sign}" for sign in ("Not", "USub", "Invert")),
    *(
        f"ReplaceBinaryOperator_{change}"
        for change in ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv")
    ),
    *(f"ReplaceBinaryOperator_{change}" for change in ("BitOr_BitAnd", "BitAnd_BitOr", "LShift_RShift")),
    *(f"ReplaceComparisonOperator_{change}" for change in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceComparisonOperator_{change}" for change in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
    *(f"ReplaceComparisonOperator_{change}" for change in ("Lt_GtE", "GtE_Lt", "Gt_LtE", "LtE_Gt")),
]

# Tests of other rooms that are also about this one.
ALSO = {
    "comm": ["tests/test_grouped.py", "tests/runtime/test_output.py", "tests/comm/transport/test_checked.py"],
    "comm/transport": [
        "tests/comm",
        "tests/test_grouped.py",
        *(f"tests/runtime/test_{name}.py" for name in ("worker", "launch", "leaving_groups")),
    ],
    "data_parallel": [
        "tests/train/test_parallelize.py",
        "tests/train/test_precision.py",
        "tests/extras/offload/test_memories.py",
    ],
    "pipeline": [
        "tests/train/test_tied_weights.py",
        "tests/train/test_gathers.py",
        "tests/extras/schedules/test_offloaded.py",
    ],
    "schedules": ["tests/pipeline/test_execute.py", "tests/extras/schedules/test_two_directions.py"],
    "train/checkpoint": ["tests/train/test_resume.py", "tests/train/test_state.py"],
    "spec": [
        f"tests/learn/exercises/test_{name}.py"
        for name in ("wrong_answers", "project", "containment", "command")
    ],
}


class DeleteStatement:
    """An operator of cosmic-ray's kind: a call whose result is not used, an update, or a store becomes `pass`."""

    def mutation_positions(self, node):
        if node.type == "simple_stmt" and self._has_only_effects(node.children[0]):
            yield node.start_pos, node.end_pos

    @staticmethod
    def _has_only_effects(statement) -> bool:
        if statement.type == "atom_expr":
            return statement.children[-1].children[0] == "("
        if statement.type != "expr_stmt":
            return False
        target, sign = statement.children[:2]
        return sign.type == "operator" and (sign != "=" or target.type == "atom_expr")

    def mutate(self, node, index):
        prefix = node.get_first_leaf().prefix
        node.children[0] = parso.python.tree.Keyword("pass", node.start_pos, prefix)
        return node


class DropKeyword:
    """An operator of cosmic-ray's kind: a call without one of its keyword arguments."""

    def mutation_positions(self, node):
        for argument in self._keywords(node):
            yield argument.start_pos, argument.end_pos

    @staticmethod
    def _keywords(node) -> list:
        if node.type == "arglist" or (node.type == "trailer" and node.children[0] == "("):
            named = [x for x in node.children if x.type == "argument" and x.children[1] == "="]
            return [x for x in named if x.children[0].value != "help"]
        return []

    def mutate(self, node, index):
        at = node.children.index(self._keywords(node)[index])
        if node.type == "trailer":
            del node.children[at]
        elif at == 0:
            del node.children[:2]
        else:
            del node.children[at - 1 : at + 1]
        return node


def operators() -> dict[str, object]:
    ours = {"DeleteStatement": DeleteStatement(), "DropKeyword": DropKeyword()}
    return {name: get_operator(f"core/{name}")() for name in OPERATORS} | ours


class Mutant(NamedTuple):
    file: str  # from the root of the checkout
    operator: str
    occurrence: int
    start: tuple[int, int]

    def source(self, original: str) -> str:
        return mutate_code(original, operators()[self.operator], self.occurrence)


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file whose place says something about what the code does."""
    skipped = places_to_skip(source)
    for name, operator in operators().items():
        positions = (
            (start, end)
            for node in ast_nodes(parso.parse(source))
            for start, end in operator.mutation_positions(node)
        )
        for occurrence, (start, _) in enumerate(positions):
            if not any(first <= start < last for first, last in skipped):
                yield Mutant(file, name, occurrence, start)


def places_to_skip(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the ranges where a mutant changes only words, types, or what is checked of ourselves.

    They are annotations, `raise` and `assert` statements, `__repr__`, what only a type checker reads, and aliases of types;
    and `@staticmethod` in an autograd function.
    """
    lines = source.encode().splitlines()

    def place(line: int, column: int) -> tuple[int, int]:  # ast counts bytes, parso counts characters
        return line, len(lines[line - 1][:column].decode())

    # From one character before, for a decorator's node begins after its @.
    return [
        (place(node.lineno, max(0, node.col_offset - 1)), place(node.end_lineno, node.end_col_offset))
        for node in _nodes_to_skip(ast.parse(source))
    ]


def _nodes_to_skip(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        match node:
            case ast.Raise() | ast.Assert():
                yield node
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.FunctionDef(name="__repr__" | "__str__"):
                yield node
            case ast.FunctionDef(decorator_list=decorators, returns=returns):
                yield from [] if returns is None else [returns]
                names = {ast.unparse(decorator) for decorator in decorators}
                yield from decorators if names & {"abstractmethod", "overload", "override"} else []
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from node.body
            case ast.Call(func=ast.Name(id="TypeVar")):
                yield node
            case ast.ClassDef(bases=[ast.Name(id="Function")]):  # torch calls its methods through the class
                decorators = [
                    d for f in node.body if isinstance(f, ast.FunctionDef) for d in f.decorator_list
                ]
                yield from (d for d in decorators if ast.unparse(d) == "staticmethod")
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from (
                x for x in ast.walk(node.value) if isinstance(x, ast.BinOp) and isinstance(x.op, ast.BitOr)
            )


def draw(mutants: list[Mutant], sample: int, seed: int) -> list[Mutant]:
    """Return one mutant for each of `sample` places: a place with many mutants is as likely as one with few.

    A larger sample by the same seed begins with the smaller one.
    """
    places = defaultdict(list)
    for mutant in mutants:
        places[mutant.file, mutant.start].append(mutant)
    rng = random.Random(seed)
    chosen = [rng.choice(places[place]) for place in sorted(places)]
    rng.shuffle(chosen)
    return chosen[:sample]


def changed_lines(before: str, after: str) -> tuple[str, str]:
    """Return the lines that differ, without their indentation, each side joined to one."""
    old, new = before.splitlines(), after.splitlines()
    pieces: tuple[list[str], list[str]] = ([], [])
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            pieces[0].extend(line.strip() for line in old[i1:i2])
            pieces[1].extend(line.strip() for line in new[j1:j2])
    return " ".join(pieces[0]), " ".join(pieces[1])


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks or would track; nothing is ever mutated in the checkout itself."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\0"
    ):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


class Unshrunk:
    """A plugin of pytest: Hypothesis stops at its first failing example, for here nobody reads a smaller one."""

    @pytest.hookimpl(trylast=True)  # after tests/conftest.py has chosen a profile
    def pytest_configure(self, config):
        chosen = settings.get_profile(settings.get_current_profile_name())
        settings.register_profile("unshrunk", chosen, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("unshrunk")


class Judge:
    """Runs tests in the copy, each time in a process forked from this one, which has imported torch and pytest already."""

    def __init__(self, folder: Path, quick: bool):
        self.folder, self.quick = folder, quick
        self.log = folder / "pytest.log"
        self.temporary = folder / "tmp"  # removed with the copy, whatever killed tests leave there
        self.temporary.mkdir()

    def run(self, arguments: list[str], timeout_s: float) -> int | None:
        """Return pytest's exit status, or None if it took too long. Nothing that it started outlives it."""
        process = multiprocessing.get_context("fork").Process(target=self._pytest, args=[arguments])
        process.start()
        try:
            process.join(timeout_s)
            return process.exitcode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()

    def _pytest(self, arguments: list[str]) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(self.folder)
        with self.log.open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path[:] = [str(self.folder), *(p for p in sys.path if p not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(self.folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.temporary)
        quick = ["--quick"] if self.quick else []
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *quick, *arguments], [Unshrunk()]))
        sys.stdout.flush()
        sys.exit(code)

    def first_failure(self) -> str:
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return line.split(" ")[1]
        return "?"

    def clean_run(self, paths: list[str]) -> dict[str, float]:
        """Run the tests without a mutant. Return the seconds that each file took."""
        report = self.folder / "junit.xml"
        code = self.run([f"--junitxml={report}", *paths], timeout_s=3600)
        if code != 0:
            sys.exit(f"the tests fail without any mutant:\n{self.log.read_text()[-3000:]}")
        seconds: Counter[str] = Counter()
        for case in ElementTree.parse(report).iter("testcase"):
            name = case.get("classname", "").replace(".", "/") + ".py"
            seconds[name] += float(case.get("time", 0))
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant's byte code must not outlive it
        sys.dont_write_bytecode = True
        return dict(seconds)

    def judge(self, mutant: Mutant, files: list[str], timeout_s: float) -> dict:
        path = self.folder / mutant.file
        original, status = path.read_text(), path.stat()
        changed = mutant.source(original)
        before, after = changed_lines(original, changed)
        started = time.monotonic()
        try:
            path.write_text(changed)
            code = self.run(files, timeout_s)
        finally:
            path.write_text(original)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # its byte code is valid again
        outcome = "killed" if code else "survived"
        by = "" if code == 0 else "timeout" if code is None else self.first_failure()
        if code is None:
            outcome = "killed"
        diff = difflib.unified_diff(
            original.splitlines(), changed.splitlines(), mutant.file, mutant.file, "", "", 3, ""
        )
        return {
            **mutant._asdict(),
            "line": before,
            "mutant": after,
            "outcome": outcome,
            "by": by,
            "seconds": round(time.monotonic() - started, 1),
            "diff": "\n".join(diff),
        }


def in_order(mutant: Mutant, seconds: dict[str, float], kills: Counter[str]) -> list[str]:
    """The test file of the mutant's module first, then all others, by how many mutants they have killed in a second."""
    own = f"test_{Path(mutant.file).stem}.py"
    return sorted(
        seconds, key=lambda name: (Path(name).name != own, (seconds[name] + 0.5) / (kills[name] + 0.5))
    )


def unexplained(rows: Iterable[dict]) -> list[dict]:
    """Return the mutants that survived and that tests/survivors.toml does not explain."""
    known = tomllib.loads((ROOT / "tests" / "survivors.toml").read_text())["survivor"]
    explained = {(row["file"], row["line"], row["mutant"]) for row in known}
    survived = [row for row in rows if row["outcome"] == "survived"]
    return [row for row in survived if (row["file"], row["line"], row["mutant"]) not in explained]


def modules(room: str) -> list[Path]:
    return sorted(f for f in (ROOT / "minipar" / room).glob("*.py") if f.name != "__init__.py")


def rooms() -> list[str]:
    """Return the folders of minipar that have modules, and tests in a folder of the same name."""
    tested = sorted({path.parent.relative_to(ROOT / "tests") for path in ROOT.glob("tests/*/**/test_*.py")})
    return [str(folder) for folder in tested if modules(str(folder))]


def all_mutants(room: str) -> list[Mutant]:
    return [
        mutant
        for file in modules(room)
        for mutant in mutants_of(str(file.relative_to(ROOT)), file.read_text())
    ]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"make mutate: {message}\n")


def parsed() -> argparse.Namespace:
    parser = Parser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("room", metavar="ROOM", help="a folder of minipar/, such as comm or learn/exercises")
    parser.add_argument("--sample", metavar="SAMPLE", type=int, default=60, help="how many mutants")
    parser.add_argument("--seed", metavar="SEED", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="only those that survived the last time")
    parser.add_argument("--more", action="store_true", help="only those that were not tried the last time")
    parser.add_argument("--full", action="store_true", help="all examples of the tests, not those of --quick")
    options = parser.parse_args()
    if options.room not in rooms():
        parser.error(f"ROOM={options.room} has no code with tests; use one of {', '.join(rooms())}")
    if options.sample < 1:
        parser.error(f"SAMPLE={options.sample}: at least one mutant must be tried")
    return options


def main() -> None:
    options = parsed()
    name = options.room.replace("/", "_")
    RESULTS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="minipar-mutants-", ignore_cleanup_errors=True) as folder:
            copy_checkout(Path(folder))
            run(options, Judge(Path(folder), not options.full), RESULTS / f"{name}.jsonl")
    except KeyboardInterrupt:
        sys.exit(f"make mutate: interrupted; {RESULTS / name}.jsonl has the mutants tried so far")
    report(RESULTS / f"{name}.jsonl", RESULTS / f"{name}.txt")


def run(options: argparse.Namespace, judge: Judge, results: Path) -> None:
    every = all_mutants(options.room)
    rows = {key(row): row for row in read(results)} if options.again or options.more else {}
    if options.again:
        again = {key(row) for row in unexplained(rows.values())}
        chosen = [m for m in every if key(m._asdict()) in again]
    else:
        chosen = [m for m in draw(every, options.sample, options.seed) if key(m._asdict()) not in rows]
    started = time.monotonic()
    seconds = judge.clean_run([f"tests/{options.room}", *ALSO.get(options.room, [])])
    clean_s = time.monotonic() - started
    print(f"{options.room}: {len(chosen)} mutants; the tests take {clean_s:.0f} s without one", flush=True)
    kills: Counter[str] = Counter()
    for number, mutant in enumerate(chosen, 1):
        row = judge.judge(mutant, in_order(mutant, seconds, kills), timeout_s=3 * clean_s + 60)
        kills[row["by"].partition("::")[0]] += 1
        rows[key(row)] = row
        print(
            f"{number:3} {row['outcome']:8} {row['seconds']:5.0f} s  {mutant.file}:{mutant.start[0]}"
            f"  {row['line']}  ->  {row['mutant']}  {row['by']}",
            flush=True,
        )
        results.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


def key(row: dict) -> tuple:
    return row["file"], row["operator"], row["occurrence"]


def read(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def report(results: Path, survivors: Path) -> None:
    """Print the counts, and write the diffs of the mutants that survived and are not explained."""
    rows = read(results)
    left = unexplained(rows)
    survivors.write_text("\n\n".join(row["diff"] for row in left))
    killed = sum(row["outcome"] == "killed" for row in rows)
    print(
        f"{len(rows)} mutants: {killed} killed ({sum(row['by'] == 'timeout' for row in rows)} by taking too long), "
        f"{len(rows) - killed - len(left)} explained, {len(left)} left, in {survivors}"
    )


if __name__ == "__main__":
    main()
