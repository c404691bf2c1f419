"""FSDP beside torch.compile, and under second derivatives: torch's numbers, or a refusal that says what would work."""

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP
from tests.data_parallel.wrapped import loss_of, network, penalised
from tests.strategies import assert_equal_to


def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double() for _ in range(2)]


def samples(rank: int, step: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + rank + step, 16, dtype=torch.float64).view(2, 8)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # traces, and leaves the kernels as they are


def whole(net: list[nn.Module]) -> tuple[nn.Module, object]:
    return compiled(nn.Sequential(*net)), None


def units(net: list[nn.Module]) -> tuple[nn.Module, object]:
    made = [compiled(part) for part in net]
    return nn.Sequential(*made), lambda module: module in made


def inside(net: list[nn.Module]) -> tuple[nn.Module, object]:
    for part in net:
        part[0].compile(backend="eager")
    return nn.Sequential(*net), lambda module: module in net


def train_compiled(world, build):
    """Two steps of gradients; the canonical parameters afterwards are those of the uncompiled model."""
    module, match = build(parts())
    fsdp = FSDP(module, world, match)
    optimizer = torch.optim.SGD(fsdp.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        fsdp(samples(world.rank, step)).square().mean().backward()
        optimizer.step()
    return list(fsdp.full_state_dict().values())


@pytest.mark.thorough
@pytest.mark.parametrize("build", [whole, units, inside])
def test_what_is_compiled_may_be_a_unit_or_be_inside_one(build):
    net = nn.Sequential(*parts())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            (net(samples(rank, step)).square().mean() / 2).backward()
        optimizer.step()
    for got in minipar.run(train_compiled, build, world_size=2, timeout_s=60):
        for value, want in zip(got, net.state_dict().values(), strict=True):
            assert_equal_to(value, want)


def wrap(world, how):
    net = parts()
    module, match = nn.Sequential(*net), lambda module: module in net
    if how == "in place":
        net[1].compile(backend="eager")
    if how == "around":
        module = compiled(module)
    fsdp = FSDP(module, world, match)
    if how == "afterwards":
        net[1].compile(backend="eager")
    return fsdp


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "in place",
            r"unit '1' is inside what torch\.compile traces, .*make what torch\.compile\(module\) returns the",
        ),
        ("around", r"unit '_orig_mod\.0' is inside what torch\.compile traces"),
        (
            "afterwards",
            r"unit '1' is wrapped in FSDP, whose hooks torch\.compile cannot trace; compile first",
        ),
    ],
)
def test_a_unit_inside_what_is_compiled_is_refused(how, says):
    with pytest.raises(minipar.RankError, match=says):
        minipar.run(wrap, how, world_size=1, timeout_s=60)


def refused_penalty(world):
    """The gradients of an ordinary backward, after a refused one and without."""
    gradients = []
    for refused in (True, False):
        fsdp = FSDP(network(), world, nn.Linear)
        if refused:
            with pytest.raises(
                RuntimeError, match="create_graph=True in a backward through unit .*use DDP or Zero"
            ):
                penalised(fsdp, world.rank)
        loss_of(fsdp, world.rank).backward()
        gradients.append([p.grad.clone() for p in fsdp.parameters()])
    return all(map(torch.equal, *gradients))


def test_fsdp_refuses_a_second_derivative_in_words():
    assert minipar.run(refused_penalty, world_size=2) == [True, True]


class Chain(nn.Module):
    """A module of one's own class: Dynamo leaves torch's containers untraced where it enters them first."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(*parts())

    def forward(self, x):
        return self.parts(x)


def traced_around(world, wrap):
    """Two steps of a compiled wrapper: the number of graphs, and the norm of the gradients of the last step."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    wrapped = wrap(Chain(), world)
    compiled = torch.compile(wrapped, backend=backend)
    for step in range(2):
        wrapped.zero_grad()
        compiled(samples(world.rank, step)).square().mean().backward()
    norm = minipar.clip_grad_norm_(wrapped.parameters(), float("inf"), world)
    return len(graphs), norm


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_a_compiled_wrapper_traces_the_module_and_not_its_hooks(wrap):
    net = nn.Sequential(*parts())
    for rank in range(2):
        (net(samples(rank, 1)).square().mean() / 2).backward()
    want = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
    for num_graphs, norm in minipar.run(traced_around, wrap, world_size=2):
        assert num_graphs == 1
        assert_equal_to(norm, want)
