"""The ground floor is small, honest, and as right as the library."""

import ast
import contextlib
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import minipar
from minipar.simple import (
    autograd,
    collectives,
    ddp,
    fsdp,
    global_loss,
    grad_norm,
    mesh,
    moe,
    pipeline,
    reshard,
    ring_attention,
    sequence_parallel,
    tensor_parallel,
    transformer,
    ulysses,
    vocab,
    zero,
)
from minipar.spec import SPECIFICATIONS
from minipar.spec.data_parallel import as_wrapper
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
    "dispatch": moe._through_experts,
    "ring_attention": ring_attention.ring_attention,
    "ring_forward": ring_attention.ring_forward,
    "ring_backward": ring_attention.ring_backward,
    "shift": ring_attention._pass_on,
    "ulysses_attention": ulysses.ulysses_attention,
    "mesh": mesh.groups,
    "average_gradients": ddp.average_gradients,
    "global_loss": global_loss.global_loss,
    "grad_norm": grad_norm.grad_norm,
    "reshard": reshard.reshard,
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_floor_meets_its_specification_on_one_to_four_ranks(name):
    report = SPECIFICATIONS[name].check(IMPLEMENTATIONS[name])
    assert report.ok, str(report)


def test_the_naive_average_has_the_numbers_and_the_bytes_of_ddp_and_no_overlap():
    report = SPECIFICATIONS["ddp"].check(as_wrapper(ddp.average_gradients))
    assert [verdict.stage for verdict in report.verdicts] == ["runs", "small", "drawn", "bytes", "order"]
    assert report.first_wrong.stage == "order"
    assert "nothing is sent before the last gradient" in report.first_wrong.words


@pytest.mark.parametrize("path", sorted(FLOOR.glob("*.py")), ids=lambda path: path.name)
def test_a_file_of_the_floor_is_short_and_reads_at_most_one_other(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 80
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    own = {module for module in modules if module.startswith("minipar.")} - {"minipar.runtime.launch"}
    assert len(own) <= 1, own
    assert all(module.startswith("minipar.simple.") for module in own), own
    assert {module.partition(".")[0] for module in modules} <= {
        "torch",
        "minipar",
        "math",
        "fractions",
        "pydoc_data",
    }
    assert ast.get_docstring(ast.parse(source)).count("minipar") >= (path.name != "__init__.py")


def test_each_version_of_the_library_begins_with_a_pointer_to_the_floor():
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
        "expert/dispatch.py": "simple/moe.py",
        "context/attention_ring.py": "simple/ring_attention.py",
        "context/ulysses.py": "simple/ulysses.py",
        "mesh/mesh.py": "simple/mesh.py",
        "train/parallelize.py": "simple/train.py",
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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_floor_is_equal_to_the_library(size):
    for apart in minipar.run(both_train, world_size=size, timeout_s=10):
        assert max(apart.values()) < 1e-12, apart
    for same in minipar.run(both_communicate, world_size=size, timeout_s=10):
        assert all(same.values()), same


def test_the_page_that_does_it_all_ends_with_the_numbers_of_one_process():
    done = subprocess.run(
        [sys.executable, "-m", "minipar.simple.train"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    for line in lines:
        mesh_loss, alone = line.split("mesh ")[1].split("   in one process ")
        assert mesh_loss == alone
    assert float(lines[-1].split()[-1]) < 3.0
    assert float(last.split()[-1]) < 1e-12


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
    for averaged, want in minipar.run(after_a_failed_backward, world_size=2, timeout_s=10):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(averaged, want))
    assert minipar.run(fsdp_modes_and_tuples, world_size=2, timeout_s=10) == [True, True]


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
        (lambda: transformer.part_of_model(transformer.whole_model(), 0, 3, World()), "minipar.partition"),
    ],
)
def test_what_the_floor_does_not_do_it_refuses_by_the_name_of_what_does(refused, says):
    with pytest.raises(ValueError, match=says):
        refused()
