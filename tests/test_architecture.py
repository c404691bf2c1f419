"""The house: who may import whom, and what only one file may do. Read from the source, nothing is run."""

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
parse = cache(ast.parse)  # each file is asked about by several tests

# Each line may import from lines above it, never from one below; parts on one line never import each other.
# A name with a dot is a part of a room.
HOUSE = """
simple
support
schedules
config
cost
comm.transport
comm
mesh
runtime
model
spec
data_parallel tensor_parallel pipeline expert context
train.data
train.checkpoint
train
train.verification
inference
extras
learn
visualize
cli
__main__
"""
LEVELS = {part: level for level, line in enumerate(HOUSE.split("\n")) for part in line.split()}

DRAWS = ("cli",)  # and imports visualize when it does, not before
# Whoever asks these for help, or runs them in a browser, does not wait for torch.
TORCH_FREE = ("schedules", "config", "cost", "cli")
SUPPORT_WITH_TORCH = ("trace", "live_bytes", "staging", "atomic_files")

# A user's folder, by the names such folders have; not inside a web address or another path.
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])(/(home|Users|root|work|mnt)/[\w.]+|[A-Z]:\\Users\\)")


def sources(*folders):
    """Every file with imports; a stub's are imported when a name is asked for."""
    return [
        path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*.py*"))
        if path.suffix in (".py", ".pyi")
    ]  # fmt: skip


def part_of(module: str) -> str:
    """The line of the house a module is on: minipar.comm.ring -> comm; `minipar` itself is the front door, above all."""
    names = module.split(".")[1:]
    inner = ".".join(names[:2])
    return inner if inner in LEVELS else names[0] if names else "minipar"


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def walk(tree: ast.AST):
    """(node, is late) of every node. Late is what is inside a function, and what only a type checker sees."""
    waiting = [(tree, False)]
    while waiting:
        node, late = waiting.pop()
        yield node, late
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        late = late or (isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING")
        waiting += [(child, late) for child in ast.iter_child_nodes(node)]


def imported(nodes, path: Path):
    """(module, line, is late) of every import, relative ones resolved; one per name of a `from`."""
    package = module_of(path).split(".")[: None if path.stem == "__init__" else -1]
    for node, late in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "import_module":
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        else:
            continue
        for name in names:
            yield name, node.lineno, late


def import_faults(imports, path: Path):
    here = part_of(module_of(path))
    if here != "minipar" and here not in LEVELS:
        yield 1, f"{here} is not in the house"
        return
    for module, line, inside_function in imports:
        if module.split(".")[0] != "minipar":
            continue
        there = part_of(module)
        if there == "visualize" and here not in ("visualize", *DRAWS):
            yield line, "imports visualize, which only cli may"
        elif there == "visualize" and here in DRAWS and not inside_function:
            yield line, "imports visualize outside a function"
        elif here in ("minipar", there) or (path.suffix == ".pyi" and there.startswith(f"{here}.")):
            continue  # a front door names what is inside; a package's own files are its own affair
        elif module == "minipar" and here in ("learn", "visualize", "cli"):
            continue  # where the package lies
        elif there not in LEVELS:
            yield line, f"imports {module}, which is not in the house"
        elif LEVELS[there] >= LEVELS[here]:
            yield line, f"imports {there}, which is not above {here}"


def torch_faults(imports, path: Path):
    """Whoever asks these parts for help, or runs them in a browser, has no torch, or does not want to wait for it."""
    free = (
        part_of(module_of(path)) in TORCH_FREE or path.name == "choices.py" or "extras/__init__" in str(path)
    )
    free = free or (part_of(module_of(path)) == "support" and path.stem not in SUPPORT_WITH_TORCH)
    if not free:
        return
    for module, line, inside_function in imports:
        if module.split(".")[0] in ("torch", "numpy") and not inside_function:
            yield line, f"imports {module.split('.')[0]}, which this part does without"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def reserved_faults(nodes, imports, path: Path):
    """What only certain files may touch: torch.distributed, and the environment."""
    uses = [(module, line) for module, line, _ in imports]
    uses += [(dotted(node), node.lineno) for node, _ in nodes if isinstance(node, ast.Attribute)]
    # Caller and worker carry the caller's environment over to the ranks whole; the others read settings.
    environment = tuple(
        f"minipar/{name}.py"
        for name in (
            "comm/transport/transports", "runtime/caller", "support/environment", "runtime/launch", "runtime/worker"
        )
    )  # fmt: skip
    allowed = {
        "torch.distributed": (
            "minipar/comm/transport/",
            "minipar/runtime/launch.py",
            "minipar/runtime/worker.py",
            "minipar/simple/comm.py",
            "minipar/simple/launch.py",
            "minipar/spec/own_comm.py",
            "minipar/spec/counted.py",
            "minipar/extras/checkpoints/",
            "minipar/learn/exercises/stubs/project/comm.py",
        ),
        "os.environ": environment,
        "os.getenv": environment,
    }
    for use, line in uses:
        for name, files in allowed.items():
            if (use == name or use.startswith(f"{name}.")) and not path.as_posix().startswith(files):
                yield line, f"uses {name}; only {' and '.join(files)} may"


def faults(source: str, path: Path) -> list[str]:
    """Everything in this source that breaks the rules of the house, as `file:line: what`."""
    tree = parse(source)
    nodes = list(walk(tree))
    imports = list(imported(nodes, path))
    found = [*import_faults(imports, path), *torch_faults(imports, path)]
    found += reserved_faults(nodes, imports, path)
    if path.name == "__init__.py" and not ast.get_docstring(tree):
        found.append((1, "a package without a docstring"))
    return sorted({f"{path}:{line}: {what}" for line, what in found})


@pytest.mark.parametrize("path", sources("minipar", "minipar/visualize"), ids=str)
def test_every_file_keeps_to_its_place_in_the_house(path):
    assert faults((ROOT / path).read_text(), path) == []


def test_nothing_names_a_path_of_somebodys_machine():
    folders = ("minipar", "visualize", "tests", "lessons", "benchmarks")
    paths = [
        p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".ipynb", ".md")
    ]
    paths += [
        p
        for p in ROOT.iterdir()
        if p.is_file() and p.suffix in (".md", ".toml", ".txt", "") and p.name != ".git"
    ]
    named = {str(p.relative_to(ROOT)): MACHINE_PATH.findall(p.read_text(errors="replace")) for p in paths}
    assert {path: found for path, found in named.items() if found} == {}


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("comm/ring.py", "from minipar.mesh import Mesh", "mesh, which is not above comm"),
        ("comm/ring.py", "from minipar import mesh", "mesh, which is not above comm"),
        ("comm/ring.py", "from .. import mesh", "mesh, which is not above comm"),
        ("comm/ring.py", "import_module('minipar.mesh').Mesh", "mesh, which is not above comm"),
        (
            "comm/transport/stream.py",
            "from minipar.comm import ring",
            "comm, which is not above comm.transport",
        ),
        ("train/__init__.pyi", "from minipar.inference import x", "inference, which is not above train"),
        ("comm/ring.py", "from ..model.linear import Linear", "model, which is not above comm"),
        ("comm/__init__.py", '"""Doc."""\nfrom ..runtime import run', "runtime, which is not above comm"),
        (
            "pipeline/execute.py",
            "import minipar.context.token_layout",
            "context, which is not above pipeline",
        ),
        ("pipeline/execute.py", "def f():\n    from minipar.expert import x", "execute.py:2: imports expert"),
        ("model/block.py", "from minipar import Mesh", "minipar.Mesh, which is not in the house"),
        ("schedules/costs.py", "import torch", "imports torch, which this part does without"),
        ("schedules/costs.py", "from numpy import array", "imports numpy, which this part does without"),
        ("odds/ends.py", "", "odds is not in the house"),
        ("train/verify.py", "def f():\n    import minipar.visualize.loss", "which only cli may"),
        ("cli/plan.py", "from minipar.visualize import loss", "outside a function"),
        ("train/optim.py", "from minipar.extras.optimizers import Lamb", "extras, which is not above train"),
        ("extras/compress/choices.py", "import torch", "imports torch, which this part does without"),
        ("model/block.py", "import torch.distributed as dist", "uses torch.distributed"),
        ("model/block.py", "from torch import distributed", "uses torch.distributed"),
        ("model/block.py", "from torch.distributed import nn", "uses torch.distributed"),
        ("model/block.py", "import torch\ntorch.distributed.barrier()", "block.py:2: uses torch.distributed"),
        ("model/block.py", "import os\nos.environ['X']", "uses os.environ"),
        ("model/block.py", "from os import environ", "uses os.environ"),
        ("model/block.py", "import os\nos.getenv('X')", "uses os.getenv"),
        ("model/__init__.py", "import torch", "a package without a docstring"),
    ],
)
def test_a_planted_fault_is_found(path, source, fault):
    found = faults(source, Path("minipar") / path)
    assert len(found) >= 1
    assert all(fault in line for line in found)


WITHOUT_TORCH = ["minipar", "minipar.schedules", "minipar.cost", "minipar.cli", "minipar.config.train_config"]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_counts_without_torch_imports_none(module):
    """In a process of its own: what a file imports may import more."""
    program = f"import sys, {module}; print(*({{'torch', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "minipar/__init__.py",
            '"""Doc."""\nfrom minipar.runtime.launch import run\nfrom minipar.train import train',
        ),
        (
            "minipar/comm/ring.py",
            "import torch\nfrom . import tree\nfrom minipar.support.errors import one_of",
        ),
        ("minipar/cli/timeline.py", "def timeline():\n    import minipar.visualize.timeline"),
        ("minipar/runtime/launch.py", "import os\nimport torch.distributed as dist\nos.environ['RANK']"),
        ("minipar/visualize/timeline.py", "from minipar import pipeline\nfrom . import style"),
        ("minipar/model/block.py", "import os\nos.path.join('environ')"),
    ],
)
def test_what_the_house_allows_is_not_a_fault(path, source):
    assert faults(source, Path(path)) == []


def test_a_path_of_a_machine_is_told_from_an_address():
    home = "/" + "home/ann/minipar"  # in two, or this very line would be found
    for text in (home, f"open('{home}')", f'"File \\"{home}'):
        assert MACHINE_PATH.search(text)
    for text in (f"https://example.org{home}", "~/work/minipar", "tests/root/x", "runs/NAME"):
        assert not MACHINE_PATH.search(text)


# Files that import each other ----------------------------------------------------------------------------------------


def circle(texts: dict[Path, str]) -> list[str]:
    """Files that import each other in a circle, from the first to itself; [] if there are none.

    An import inside a function, or for a type checker, counts: whoever reads the file needs the other one.
    """
    files = {module_of(path): path for path in texts}
    arrows = {}
    for here, path in files.items():
        named = {module for module, _, _ in imported(walk(parse(texts[path])), path)}
        arrows[here] = (named | {name.rpartition(".")[0] for name in named - files.keys()}) - {here}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    assert (
        circle({path: (ROOT / path).read_text() for path in sources("minipar") if path.suffix == ".py"}) == []
    )


@pytest.mark.parametrize(
    "late",
    ["import minipar.a", "def f():\n    from minipar import a", "if TYPE_CHECKING:\n    from .a import x"],
)
def test_a_planted_circle_is_found(late):
    texts = {
        "a": "from minipar.b import x",
        "b": "from minipar.c import y",
        "c": late,
        "d": "import minipar.a",
    }
    found = circle({Path(f"minipar/{name}.py"): text for name, text in texts.items()})
    assert set(found) == {"minipar.a", "minipar.b", "minipar.c"}


# What a strategy may change in a model: what minipar/model/overrides.py declares ---------------------------------

STRATEGIES = ("data_parallel", "tensor_parallel", "expert", "context", "pipeline")
MODULE_NAMES = {
    "attention",
    "block",
    "experts",
    "layer",
    "linear",
    "mlp",
    "model",
    "module",
    "moe",
    "net",
    "stage",
}
PARAMETER_NAMES = {"weight", "bias"}  # declared as "parameters"
NAMED_AT_RUN_TIME = {"block", "moe.experts"}  # a layer's child modules, and the experts' parameters


def declared_overrides() -> tuple[set[str], set[str]]:
    """(override points, the other attributes that strategies replace), read from the one file that declares them."""
    tree = parse((ROOT / "minipar/model/overrides.py").read_text())
    records = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Overrides")
    ]
    points = {a.target.id for record in records for a in record.body if isinstance(a, ast.AnnAssign)}
    table = [line for line in ast.get_docstring(tree).splitlines() if line.startswith("    ")]
    return points, PARAMETER_NAMES | set(re.findall(r"\w+", " ".join(table).replace("norms", "norm")))


def assigned(tree: ast.AST):
    """(object, attribute, line) of every assignment to an attribute; the attribute is None if only the run knows it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield dotted(node.value), node.attr, node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            yield dotted(node.args[0]), name, node.lineno


def override_faults(source: str, path: str) -> list[str]:
    """Assignments of a strategy to the model that are not declared, as `file:line: what`."""
    points, replaced = declared_overrides()
    found = []
    for target, name, line in assigned(parse(source)):
        last = target.split(".")[-1]
        if last == "overrides":
            wrong = name not in points
        elif target in ("self", "ctx") or last not in MODULE_NAMES:
            continue
        else:
            wrong = name not in replaced if name else target not in NAMED_AT_RUN_TIME
        if wrong:
            found.append(f"{path}:{line}: {target}.{name} is not declared in minipar/model/overrides.py")
    return found


@pytest.mark.parametrize("path", sources(*(f"minipar/{name}" for name in STRATEGIES)), ids=str)
def test_strategies_assign_only_what_the_model_declares(path):
    assert override_faults((ROOT / path).read_text(), str(path)) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("model.overrides.loss = f", "model.overrides.loss"),
        ("block.attention.overrides.core_ = f", "core_"),
        ("model.forward_hidden = f", "model.forward_hidden"),
        ("for layer in model.layers: layer.attention.rope = None", "rope"),
        ("attention.q, attention.scale = a, b", "attention.scale"),
        ("model.layers += extra", "model.layers"),
        ("del block.mlp_norm", "block.mlp_norm"),
        ("setattr(model, 'config', c)", "model.config"),
        ("setattr(attention, name, c)", "attention.None"),
    ],
)
def test_an_undeclared_assignment_to_the_model_is_found(source, fault):
    (found,) = override_faults(source, "x.py")
    assert fault in found


def test_what_the_model_declares_may_be_assigned():
    allowed = ["model.overrides.output = f", "attention.q = f", "attention.num_heads = 2", "block.overrides.call = f",
               "linear.weight = w", "unit.module.forward = f", "self.model = model", "setattr(block, name, f)"]  # fmt: skip
    assert override_faults("\n".join(allowed), "x.py") == []


WITHOUT_MAP = ("minipar", "stubs")
INITS = [path for path in sources("minipar", "visualize") if path.name == "__init__.py"]
ROOMS = [path.parent for path in INITS if path.parent.name not in WITHOUT_MAP]


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_the_map_of_a_room_names_its_files_and_no_others(room):
    doc = ast.get_docstring(parse((ROOT / room / "__init__.py").read_text()))
    there = {path.name for path in (ROOT / room).glob("*.py")} - {"__init__.py", "__main__.py"}
    assert there - set(re.findall(r"\w+\.py", doc)) == set()
    assert set(re.findall(r"^(\w+\.py) ", doc, re.MULTILINE)) - there == set()


def test_the_maps_for_readers_are_in_the_order_of_the_house():
    doc = ast.get_docstring(parse((ROOT / "minipar" / "__init__.py").read_text()))
    listed = [m[1] for line in doc.splitlines() if (m := re.match(r"(\w+)  +\S", line))]
    assert set(listed) == {room for room in LEVELS if "." not in room}
    page = (ROOT / "docs" / "design.md").read_text().split("| room | what it has |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(rows) == {path.parent.name for path in (ROOT / "minipar").glob("*/__init__.py")}
    for order in (listed, rows):
        levels = [LEVELS[name] for name in order]
        assert levels == sorted(levels), order
