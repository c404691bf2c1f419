"""docs/names.md tells the truth: about minipar, about the torch that is installed, and about where others were seen."""

import importlib
import inspect
import re
import tomllib
from pathlib import Path, PurePosixPath

import pytest

import minipar
from minipar.cli.flags import flags_of
from minipar.config.choices import CHOSEN
from minipar.config.train_config import TrainConfig
from tests.names_seen import Seen, load, not_there

NAMES = Path(__file__).parent.parent / "docs" / "names.md"


SEEN = NAMES.parent.parent / "tests" / "names_seen.toml"
NAME = r"`[^`|]+`( \([^)`]+\))?"
CELL = re.compile(
    rf"-|\([^)`]+\)|{NAME}(, {NAME})*"
)  # of another framework: a dash, a remark, or names with remarks


def rows(page: str):
    """Every row of every table, as a dict from the column's name to the cell."""
    header: list[str] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif not cells[0].startswith("---"):
            assert len(cells) == len(header), line
            yield dict(zip(header, cells))


def names_of(page: str, framework: str) -> set[str]:
    """The names in a framework's columns."""
    return {name for row in rows(page) for name, _ in spans(row.get(framework, ""))}


def unlike(page: str, seen: dict[str, list[Seen]]) -> set[tuple[str, str]]:
    """(framework, name) of every name that the page has and the table of where they were seen has not, or the reverse."""
    return {
        (framework, name)
        for framework, entries in seen.items()
        for name in names_of(page, framework) ^ {entry.name for entry in entries}
    }


def spans(cell: str) -> list[tuple[str, str]]:
    """(name in backticks, what stands in brackets behind it)."""
    return re.findall(r"`([^`]+)`(?: \(([^)]*)\))?", cell)


def find(name: str):
    """What a dotted Python name means: the longest module of it, then attributes."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = attribute(found, part)
        return found
    raise ModuleNotFoundError(name)


def attribute(owner, name: str):
    """The attribute; of a class also one that its instances get."""
    if inspect.isclass(owner) and not hasattr(owner, name):
        ours = [base for base in owner.__mro__ if base.__module__.startswith("minipar")]
        if any(re.search(rf"self\.{name}\b[^=\n]*=", inspect.getsource(base)) for base in ours):
            return name
    return getattr(owner, name)


def flag_names(flags, prefix="--") -> set[str]:
    names = set()
    for field, value in vars(flags).items():
        if hasattr(value, "__dataclass_fields__"):
            own = f"{prefix}{field.replace('_', '-')}." if field in ("model", *CHOSEN) else prefix
            names |= flag_names(value, own)
        else:
            names.add((prefix + field).replace("_", "-"))
    return names


FLAGS = flag_names(flags_of(TrainConfig(), {}, None))  # None: the options of every choice
TABLES = list(rows(NAMES.read_text()))
ROWS = [(row["concept"], row["minipar"], row["torch"]) for row in TABLES if "minipar" in row]
WHERE = load(SEEN.read_text())


def test_the_tables_are_read():
    assert len(ROWS) > 170
    assert len({concept for concept, *_ in ROWS}) == len(ROWS)
    assert {"--dp", "--cp-attention", "--model.num-experts", "--compress.rank"} <= FLAGS


@pytest.mark.parametrize(("concept", "ours"), [row[:2] for row in ROWS], ids=[row[0] for row in ROWS])
def test_our_names_exist(concept, ours):
    for name, options in spans(ours):
        if name.startswith("--"):
            assert name in FLAGS
            continue
        found = find(f"minipar.{name}")
        for option in re.findall(r"(\w+)=", options):
            assert option in inspect.signature(found).parameters, f"{name} has no {option}"


@pytest.mark.parametrize(("concept", "theirs"), [(c, t) for c, _, t in ROWS], ids=[row[0] for row in ROWS])
def test_torchs_names_exist(concept, theirs):
    for name, _ in spans(theirs):
        if name.startswith("torch."):
            find(name)


def test_what_other_libraries_call_an_idea_is_about_an_idea_of_ours():
    others = [row["concept"] for row in TABLES if "minipar" not in row]
    ours = [concept for concept, *_ in ROWS]
    assert others == [concept for concept in ours if concept in others]  # each once, and in the same order


def test_every_column_of_another_framework_has_its_table():
    assert {name for row in TABLES for name in row} - {"concept", "minipar", "torch", "letter"} == set(WHERE)


@pytest.mark.parametrize("framework", WHERE)
def test_a_cell_of_another_framework_is_a_dash_or_names(framework):
    assert [row[framework] for row in TABLES if framework in row and not CELL.fullmatch(row[framework])] == []


def test_every_foreign_name_was_seen_and_every_row_is_used():
    assert unlike(NAMES.read_text(), WHERE) == set()


@pytest.mark.parametrize("framework", WHERE)
def test_where_a_name_was_seen_is_whole(framework):
    table = tomllib.loads(SEEN.read_text())[framework]
    assert set(table) - {"commit"} == {"version", "seen"}
    assert re.fullmatch(r"[a-z ]*\d+(\.\d+)+", table["version"])
    assert re.fullmatch("[0-9a-f]{40}", table.get("commit", 40 * "0"))
    assert len({name for name, *_ in WHERE[framework]}) == len(WHERE[framework])
    for name, file, line, text in WHERE[framework]:
        path = PurePosixPath(file)
        assert path.name, name
        assert not path.is_absolute(), name
        assert not {"..", ".", ""} & set(file.split("/")), name
        assert type(line) is int, name
        assert line > 0, name
        assert text.strip() == text != "", name


def test_a_changed_name_and_a_removed_row_are_noticed():
    page = NAMES.read_text()
    for framework, entries in WHERE.items():
        without = {**WHERE, framework: entries[1:]}
        assert unlike(page, without) == {(framework, entries[0].name)}
    changed = page.replace("`--clip-grad`", "`--clip-grads`")
    assert unlike(changed, WHERE) == {("Megatron-LM", "--clip-grad"), ("Megatron-LM", "--clip-grads")}
    assert not CELL.fullmatch("--clip-grad")
    with pytest.raises(TypeError):
        load('[DeepSpeed]\nversion = "1.0"\nseen = [{ name = "k", line = 1 }]')


def test_looking_again_finds_what_has_moved(tmp_path):
    (tmp_path / "config.py").write_text("first = 1\nclip_grad: float\nclip_grads = 2\n")
    there = Seen("--clip-grad", "config.py", 2, "clip_grad")
    moved = [there._replace(line=line) for line in (1, 3, 4)] + [there._replace(file="gone.py")]
    assert not_there([there, *moved], tmp_path) == moved


def test_every_public_name_of_a_strategy_is_in_the_tables():
    text = NAMES.read_text()
    for name in ("DDP", "ZeroOptimizer", "FSDP", "ColumnParallelLinear", "Pipeline", "ring_attention"):
        assert hasattr(minipar, name)
        assert f"`{name}" in text


def test_a_name_that_does_not_exist_is_noticed():
    with pytest.raises(AttributeError):
        find("minipar.comm.autograd.copy_to_region")
    with pytest.raises(ModuleNotFoundError):
        find("nowhere.at.all")
    assert "--tensor-model-parallel-size" not in FLAGS
