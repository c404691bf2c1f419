"""docs/names.md tells the truth: about minipar, and about the torch that is installed."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import minipar
from minipar.cli.flags import flags_of
from minipar.config.choices import CHOSEN
from minipar.config.train_config import TrainConfig

NAMES = Path(__file__).parent.parent / "docs" / "names.md"


def rows():
    """(concept, ours, torch's) of every row of every table."""
    for line in NAMES.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) == 7 and cells[0] != "concept" and not cells[0].startswith("---"):
            yield cells[0], cells[1], cells[2]


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
ROWS = list(rows())


def test_the_tables_are_read():
    assert len(ROWS) > 70
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
