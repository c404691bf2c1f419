"""The ground floor is small, honest, and as right as the library."""

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from torch import nn

import minipar
from minipar.learn.exercises.registry import EXERCISES
from minipar.simple import (
    autograd,
    collectives,
    comm,
    ddp,
    dispatch,
    fsdp,
    global_loss,
    grad_norm,
    launch,
    mesh,
    moe,
    pipeline,
    reshard,
    ring_attention,
    sequence_parallel,
    tensor_parallel,
    train,
    transformer,
    ulysses,
    vocab,
    zero,
)
from minipar.spec import SPECIFICATIONS
from minipar.spec.data_parallel import as_wrapper
from minipar.spec.own_comm import on_comm
from minipar.spec.training import chain, loss_of, samples

FLOOR = Path(minipar.__file__).parent / "simple"
IMPLEMENTATIONS = {
    **{
        name: getattr(collectives, name)
        for name in ("reduce_scatter", "all_gather", "all_reduce", "all_reduce_", "broadcast", "all_to_all")
    },
    "conjugates": autograd,
    "ddp": ddp.DDP,
    "zero1": zero.Zero1,
    "zero2": zero.Zero2,
    "fsdp": fsdp.FSDP,
    "mlp": tensor_parallel.mlp,
    "attention": partial(tensor_parallel.attention, head_dim=4),
    "sequence_parallel": sequence_parallel.block,
    "vocab_embedding": vocab.embedding,
    "vocab_loss": vocab.cross_entropy,
    "pipeline_gpipe": pipeline.gpipe,
    "pipeline_one_f_one_b": pipeline.one_f_one_b,
    "switch": moe.switch,
    "dispatch": dispatch.dispatch,
    "ring_attention": ring_attention.ring_attention,
    "ring_forward": ring_attention.ring_forward,
    "ring_backward": ring_attention.ring_backward,
    "shift": ring_attention.pass_on,
    "ulysses_attention": ulysses.ulysses_attention,
    "mesh": mesh.groups,
    "average_gradients": ddp.average_gradients,
    "global_loss": global_loss.global_loss,
    "grad_norm": grad_norm.grad_norm,
    "reshard": reshard.reshard,
}


# What an exercise has as its solution, tests/learn/exercises/test_exercises.py holds to the same specification.
SOLUTIONS = {(e.specification, resolve_name(place)) for e in EXERCISES for place in e.solution.values()}
OTHERS = [name for name, floors in IMPLEMENTATIONS.items() if (name, floors) not in SOLUTIONS]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OTHERS)
def test_the_floor_meets_its_specification_on_one_to_four_ranks(name):
    report = SPECIFICATIONS[name].check(IMPLEMENTATIONS[name])
    assert report.ok, str(report)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_floor_meets_its_specification_on_its_own_comm(name):
    report = SPECIFICATIONS[name].check(on_comm(comm.Comm, IMPLEMENTATIONS[name]))
    assert report.ok, str(report)


class SendsToTheLeft(comm.Comm):
    """A Comm with a fault: it takes the ring the other way around."""

    def exchange(self, x, to, shape, dtype, source):
        return super().exchange(x, source, shape, dtype, to)


def test_a_fault_in_the_comm_is_found_by_the_specification_of_a_shift():
    report = SPECIFICATIONS["shift"].check(on_comm(SendsToTheLeft, ring_attention.pass_on))
    assert report.first_wrong.stage == "small", str(report)
    assert re.search("is rank .'s; it should be rank", report.first_wrong.words)


def test_the_naive_average_equals_ddp_but_overlaps_nothing():
    report = SPECIFICATIONS["ddp"].check(as_wrapper(ddp.average_gradients))
    assert [verdict.stage for verdict in report.verdicts] == ["runs", "small", "drawn", "bytes", "order"]
    assert report.first_wrong.stage == "order"
    assert "nothing is sent before the last gradient" in report.first_wrong.words


STANDARD = set(sys.stdlib_module_names) - {"pydoc_data"}


@pytest.mark.parametrize("path", sorted(FLOOR.glob("*.py")), ids=lambda path: path.name)
def test_a_file_of_the_floor_needs_torch_and_its_neighbours_alone(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            assert (FLOOR / f"{node.module}.py").exists() or node.module is None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            assert {name.partition(".")[0] for name in names} <= {"torch", *STANDARD}
    assert "minipar" in ast.get_docstring(tree)


WAYS = {  # files and lines from an idea to isend and irecv
    "all_reduce": (("collectives", "comm"), 190),
    "ddp": (("ddp", "comm", "collectives"), 280),
    "fsdp": (("fsdp", "comm", "collectives"), 280),
    "one_f_one_b": (("pipeline", "comm"), 180),
}


@pytest.mark.parametrize("idea", WAYS)
def test_the_way_from_an_idea_to_the_wire_is_short(idea):
    files, limit = WAYS[idea]
    sources = [(FLOOR / f"{name}.py").read_text() for name in files]
    assert sum(len(source.splitlines()) for source in sources) <= limit
    for source in sources:  # and it is the whole way; a message needs no collective
        imported = {m[1] or m[2] for m in re.finditer(r"^from \.(?:(\w+)| import (\w+))", source, re.M)}
        assert imported <= {*files, "collectives"}


def test_each_library_version_begins_by_pointing_to_the_floor():
    pointers = {
        "data_parallel/ddp.py": "simple/ddp.py",
        "data_parallel/zero.py": "simple/zero.py",
        "data_parallel/fsdp.py": "simple/fsdp.py",
        "comm/ring.py": "simple/collectives.py",
        "comm/tree.py": "simple/collectives.py",
        "comm/pairwise.py": "simple/collectives.py",
        "comm/autograd.py": "simple/autograd.py",
        "tensor_parallel/column.py": "simple/tensor_parallel.py",
        "tensor_parallel/parallel_linear.py": "simple/tensor_parallel.py",
        "tensor_parallel/vocab.py": "simple/vocab.py",
        "tensor_parallel/sequence.py": "simple/sequence_parallel.py",
        "pipeline/execute.py": "simple/pipeline.py",
        "schedules/one_f_one_b.py": "simple/pipeline.py",
        "schedules/gpipe.py": "simple/pipeline.py",
        "model/moe.py": "simple/moe.py",
        "expert/dispatch.py": "simple/dispatch.py",
        "context/attention_ring.py": "simple/ring_attention.py",
        "context/ulysses.py": "simple/ulysses.py",
        "mesh/mesh.py": "simple/mesh.py",
        "train/parallelize.py": "simple/train.py",
        "inference/blocks.py": "simple/paged.py",
        "inference/scheduler.py": "simple/continuous.py",
        "inference/speculative.py": "simple/speculative.py",
    }
    for path, floor in pointers.items():
        doc = ast.get_docstring(ast.parse((FLOOR.parent / path).read_text()))
        assert f"`{floor}`" in doc.split("\n\n")[1], path


# Equal to the library -----------------------------------------------------------------------------------------------


def both_train(world) -> dict[str, float]:
    """The largest difference between the floor's and the library's gradients or parameters, of the same training."""
    make = {
        "ddp": (lambda net: ddp.DDP(net, world), lambda net: minipar.DDP(net, world)),
        "fsdp": (
            lambda net: fsdp.FSDP(net, world, nn.Linear),
            lambda net: minipar.FSDP(net, world, units=nn.Linear),
        ),
    }
    apart = {}
    for name, pair in make.items():
        outs = []
        for wrap in pair:
            wrapped = wrap(chain(1))
            optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(wrapped(samples(world.rank, step, 5))).backward()
                optimizer.step()
            outs.append(wrapped(samples(world.rank, 9, 5)).detach())
        apart[name] = (outs[0] - outs[1]).abs().max().item()
    for stage, simple in ((1, zero.Zero1), (2, zero.Zero2)):
        params = []
        for cls, options in ((simple, {}), (minipar.ZeroOptimizer, {"stage": stage})):
            net = chain(1)
            optimizer = cls(net.parameters(), torch.optim.Adam, world, lr=0.1, **options)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(net(samples(world.rank, step, 5))).backward()
                optimizer.step()
            params.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        apart[f"zero{stage}"] = (params[0] - params[1]).abs().max().item()
    return apart


def both_communicate(world) -> dict[str, bool]:
    """Bit for bit: the floor's ring adds in the order of the library's."""
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(world.rank))
    ring = world.using("ring")
    return {
        "reduce_scatter": torch.equal(collectives.reduce_scatter(world, x), ring.reduce_scatter(x)),
        "all_gather": torch.equal(collectives.all_gather(world, x), ring.all_gather(x)),
        "all_reduce": torch.equal(collectives.all_reduce(world, x), ring.all_reduce(x)),
        "broadcast": torch.equal(collectives.broadcast(world, x, 0), world.broadcast(x)),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_floor_is_equal_to_the_library(size):
    for apart in minipar.run(both_train, world_size=size):
        assert max(apart.values()) < 1e-12, apart
    for same in minipar.run(both_communicate, world_size=size):
        assert all(same.values()), same


# Carried away -------------------------------------------------------------------------------------------------------


def torch_and_what_it_needs() -> set[str]:
    """The distributions that installing torch alone installs, as far as they are here."""
    found, todo = set(), {"torch"}
    while todo:
        name = todo.pop()
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):
            needs = [need for need in requires(name) or [] if "extra ==" not in need]
            todo |= {re.match(r"[\w.-]+", need)[0] for need in needs} - found
    return found


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory):
    """The words that start a Python in which torch, and what torch needs, can be imported, and nothing else."""
    site = tmp_path_factory.mktemp("site")
    for name in torch_and_what_it_needs():
        with contextlib.suppress(PackageNotFoundError):
            for file in distribution(name).files:
                link = site / file.parts[0]
                if file.parts[0] != ".." and not link.exists():
                    link.symlink_to(Path(distribution(name).locate_file(file.parts[0])).resolve())
    return (sys.executable, "-S"), {**os.environ, "PYTHONPATH": str(site)}  # -S: without site-packages


@pytest.fixture
def folder(tmp_path):
    """A folder with a copy of the floor."""
    shutil.copytree(FLOOR, tmp_path / "simple", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def trained(words, folder, environment=None, program=(sys.executable,)):
    done = subprocess.run(
        [*program, "-m", *words.split()],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=480,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def require_equal(lines):
    *losses, last = lines
    for line in losses:
        on_mesh, alone = re.fullmatch(
            r"step +\d+   loss on the mesh (\S+)   in one process (\S+)", line
        ).groups()
        assert on_mesh == alone
    assert float(last.split()[-1]) < 1e-11, last
    return [float(line.split()[-1]) for line in losses]


@pytest.mark.thorough
def test_a_copy_trains_with_torch_alone(folder, empty_environment):
    program, environment = empty_environment
    for module in ("minipar", "pytest", "tyro"):
        done = subprocess.run(
            [*program, "-c", f"import {module}"], cwd=folder, env=environment, capture_output=True
        )
        assert b"ModuleNotFoundError" in done.stderr, module
    losses = require_equal(trained("simple.train", folder, environment, program))
    assert losses[-1] < losses[0] - 2  # of its own source, so that the losses move with every edit


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "words",
    [
        "--pp 2 --dp 2 --tp 1 --ep 2 --zero",
        "--pp 1 --dp 1 --cp 2 --tp 2 --sequence --zero",
        "--pp 1 --dp 2 --tp 2 --ep 2",
        "--pp 2 --dp 1 --cp 2 --tp 1",
        "--pp 4 --dp 1 --tp 1 --microbatches 8",
    ],
)
def test_every_mesh_trains_as_one_process_does(words):
    args = train.options(["--steps", "3", *words.split()])
    size = args.pp * args.dp * args.cp * args.tp
    require_equal(minipar.run(shown_on_the_floors_comm, args, world_size=size)[0])


def shown_on_the_floors_comm(world, args):
    lines = []
    train.compare(comm.Comm(range(world.size)), args, lines.append)
    return lines


@pytest.mark.thorough
def test_the_command_trains_on_ranks_of_its_own():
    require_equal(trained("minipar.simple.train --steps 1 --pp 1 --dp 2 --tp 1", FLOOR.parent.parent))


@pytest.mark.thorough
def test_torchruns_ranks_are_taken(folder, tmp_path):
    torchrun = f"torch.distributed.run --standalone --nproc-per-node 2 --log-dir {tmp_path}"
    require_equal(trained(f"{torchrun} -m simple.train --steps 2 --pp 1 --dp 2 --tp 1", folder))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--dp 3", "divide 16 sequences"),
        ("--cp 5", "cp 64 tokens"),
        ("--tp 0", "1 or more"),
        ("--ep 3", "ep must divide dp"),
        ("--ep -1", "1 or more"),
        ("--dp 8 --ep 8 --microbatches 1", "ep must divide dp and the experts"),
        ("--ep 2 --sequence", "whole sequences"),
        ("--ep 2 --cp 2", "whole sequences"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_before_a_rank_starts(words, says, capsys):
    with pytest.raises(SystemExit):
        train.options(words.split())
    assert says in capsys.readouterr().err


PROGRAM = """
import os, sys, time
from simple.launch import run

def ranks(world, what):
    print(f"pid {os.getpid()}\\n", end="", flush=True)
    if what == "raises" and world.rank == 1:
        {}["chunk"]
    if what == "dies" and world.rank == 1:
        os._exit(7)
    if what == "late" and world.rank == 1:
        time.sleep(1000)
    world.recv((2,), __import__("torch").float32, (world.rank + 1) % world.size)

if __name__ == "__main__":
    run(ranks, 3, sys.argv[1], timeout_s=float(sys.argv[2]))
"""


def gone(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def gone_soon(pid, seconds=60):
    """Its files are closed a moment before it has ended."""
    deadline = time.monotonic() + seconds
    while not (ended := gone(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return ended


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "timeout_s", "says"),
    [
        ("raises", "60", r"rank 1 raised:\n(.*\n)*KeyError: 'chunk'"),
        ("dies", "60", "rank 1 died, exit code 7"),
        ("late", "15", r"rank [02] raised:\n(.*\n)*RuntimeError: .*[Tt]imed out"),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(what, timeout_s, says, folder):
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", what, timeout_s],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert re.search(says, done.stderr), done.stderr
    ranks = re.findall(r"^pid (\d+)", done.stdout, re.M)
    assert ranks
    assert all(map(gone_soon, ranks))


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_nothing_is_left_running_when_the_caller_is_stopped(number, folder):
    (folder / "program.py").write_text(PROGRAM)
    caller = subprocess.Popen(
        [sys.executable, "program.py", "late", "600"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # A shell in the background ignores it, and a child would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    ranks = [caller.stdout.readline().split()[1] for _ in range(3)]
    caller.send_signal(number)
    caller.wait(timeout=240)
    assert caller.stdout.read() == ""  # at the end of the file: no rank has it open any more
    assert all(map(gone_soon, ranks))


# After an error, and in evaluation ----------------------------------------------------------------------------------


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def after_a_failed_backward(world):
    """The gradients of a step that follows a backward which raised on every rank, before any bucket was complete."""
    net = chain(1)
    wrapped = ddp.DDP(net, world)

    def fail(grad):
        raise RuntimeError("out of memory")

    out = wrapped(samples(world.rank, 0, 5))
    out.register_hook(fail)
    with contextlib.suppress(RuntimeError):
        out.sum().backward()
    wrapped.zero_grad()
    loss_of(wrapped(samples(world.rank, 1, 5))).backward()
    averaged = [p.grad.clone() for p in net.parameters()]
    alone = chain(1)
    loss_of(alone(samples(world.rank, 1, 5))).backward()
    return averaged, [world.all_reduce(p.grad, "mean") for p in alone.parameters()]


def fsdp_modes_and_tuples(world):
    wrapped = fsdp.FSDP(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)), world, nn.Linear).eval()
    same = torch.equal(wrapped(torch.ones(2, 4)), wrapped(torch.ones(2, 4)))
    with pytest.raises(ValueError, match="minipar.FSDP"):
        fsdp.FSDP(TwoOutputs(4, 4), world, nn.Linear)(torch.ones(2, 4))
    return same


def test_the_floor_after_an_error_and_in_evaluation():
    for averaged, want in minipar.run(after_a_failed_backward, world_size=2):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(averaged, want))
    assert minipar.run(fsdp_modes_and_tuples, world_size=2) == [True, True]


# What it refuses ----------------------------------------------------------------------------------------------------


class World:
    """The numbers of a Comm, for refusals that need no ranks."""

    size, rank, device = 3, 0, torch.device("cpu")

    def broadcast(self, x):
        return x

    def subgroup(self, ranks, name):
        return self


x = torch.zeros(1, 4, 6)


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: autograd.scatter_tokens(World(), x), "minipar.comm.autograd.reduce_scatter"),
        (lambda: ddp.DDP(nn.Linear(2, 2).requires_grad_(False), World()), "minipar.DDP"),
        (lambda: ddp.DDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), World()), "minipar.DDP"),
        (lambda: zero.Zero1([nn.Parameter(x, False)], torch.optim.SGD, World()), "minipar.ZeroOptimizer"),
        (
            lambda: fsdp.FSDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), World(), nn.Linear),
            "minipar.FSDP",
        ),
        (lambda: tensor_parallel.rows(World(), torch.zeros(4, 4)), "minipar.tensor_parallel"),
        (
            lambda: tensor_parallel.attention(World(), x, *[torch.zeros(6, 6)] * 4, 4),
            "minipar.tensor_parallel",
        ),
        (
            lambda: vocab.embedding(World(), torch.tensor([[9]]), torch.zeros(2, 2)),
            "vocab_parallel_cross_entropy",
        ),
        (lambda: pipeline.gpipe(World(), nn.Identity(), None, x, None, 2), "minipar.Pipeline"),
        (lambda: pipeline.gpipe(World(), nn.Identity(), None, x, None, 0), "minipar.Pipeline"),
        (lambda: moe.switch(World(), x, torch.zeros(4, 6), *[torch.zeros(1, 6, 6)] * 3), "minipar.SwitchMoE"),
        (lambda: ring_attention.ring_attention(World(), x, x, x[:, :2]), "minipar.ring_attention"),
        (
            lambda: ulysses.ulysses_attention(World(), x[None], x[None], x[None, :, :2]),
            "minipar.ulysses_attention",
        ),
        (lambda: mesh.Mesh(World(), dp=2), "minipar.Mesh"),
        (lambda: launch.run(print, 0), "use 1 or more"),
        (lambda: transformer.transformer(None, 0, 3), "minipar.partition"),
    ],
)
def test_the_floor_refuses_what_it_lacks_and_names_what_does_it(refused, says):
    with pytest.raises(ValueError, match=says):
        refused()
