"""What people do wrong around the wrappers: a table of misuses, each of which is right after all, or refused by name."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.mesh import Mesh
from minipar.tensor_parallel import Column, full_state_dict, tensor_parallel
from tests.programs import Program
from tests.strategies import assert_equal_to

RIGHT = "right"
PLAN = {"0": "column", "2": "row"}
STEPS = 2


class Misuse(NamedTuple):
    """What is done on every rank, and what is said there: `RIGHT`, or what the refusal names.

    do      world -> state dict. Each call of `train` trains the same way as in one process
    like    () -> the state dict of one process
    """

    do: object
    like: object
    said: str


def net(dtype=torch.float64, seed=0, hidden=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 4)).to(dtype)


def square():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def rows(step, own=slice(None)):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[own]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def train(called, optimizer, own=slice(None), clip=None, steps=STEPS):
    dtype = next(called.parameters()).dtype
    for step in range(steps):
        called(rows(step, own).to(dtype)).square().mean().backward()
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad()


def of(world):
    return slice(world.rank, None, world.size)


def one_process(model=None, **options):
    model = net() if model is None else model
    train(model, sgd(model), **options)
    return model.state_dict()


def clipped_in_one_process():
    model = net()
    train(model, sgd(model), clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    return model.state_dict()


# Around any wrapper ------------------------------------------------------------------------------------------------------


class Wrapped:
    """A model under one wrapper: `called`, its `optimizer`, the `tensors` that hold gradients, and its `state`."""

    def __init__(self, wrapper, world, model=None, own=None, **options):
        self.model = net() if model is None else model
        self.called, self.own = self.model, of(world) if own is None else own
        self.state = self.model.state_dict
        if wrapper == "ddp":
            self.called = DDP(self.model, world, **options)
        if wrapper == "fsdp":
            self.called = FSDP(self.model, world, **{"units": nn.Linear, **options})
            self.state = self.called.full_state_dict
        if wrapper == "tp":
            tensor_parallel(self.model, world, plan=options.get("plan", PLAN))
            self.own, self.state = own or slice(None), lambda: full_state_dict(self.model, world)
        if wrapper == "zero":
            self.optimizer = ZeroOptimizer(self.model.named_parameters(), torch.optim.SGD, world, lr=0.5)
            self.tensors = self.optimizer.shards
        else:
            self.optimizer, self.tensors = sgd(self.model), list(self.model.parameters())

    def train(self, **options):
        train(self.called, self.optimizer, self.own, **options)
        return self.state()


WRAPPERS = ("ddp", "zero", "fsdp", "tp")


def clipped(wrapper, clip):
    def do(world):
        wrapped = Wrapped(wrapper, world)
        return wrapped.train(clip=lambda: clip(wrapped, world))

    return do


CLIPS = {
    "torch's clip": lambda w, world: nn.utils.clip_grad_norm_(w.model.parameters(), 0.01),
    "torch's clip, foreach": lambda w, world: nn.utils.clip_grad_norm_(
        w.model.parameters(), 0.01, foreach=True
    ),
    "torch's clip of one": lambda w, world: [
        nn.utils.clip_grad_norm_([p], 0.01) for p in w.model.parameters()
    ],
    "torch's total norm": lambda w, world: nn.utils.get_total_norm([p.grad for p in w.model.parameters()]),
    "minipar's clip without comm": lambda w, world: minipar.clip_grad_norm_(w.tensors, 0.01),
}
CLIPPED = {
    f"{clip} under {wrapper}": Misuse(
        clipped(wrapper, CLIPS[clip]), clipped_in_one_process, r"clip_grad_norm_\((params|shards), max_norm, comm"
    )
    for wrapper in ("zero", "fsdp", "tp")
    for clip in CLIPS
}  # fmt: skip
CLIPPED["torch's clip under ddp"] = Misuse(
    clipped("ddp", CLIPS["torch's clip"]), clipped_in_one_process, RIGHT
)
CLIPPED["minipar's clip without comm under ddp"] = Misuse(
    clipped("ddp", CLIPS["minipar's clip without comm"]), clipped_in_one_process, RIGHT
)


def clipped_on_a_mesh(wrapper):
    def do(world):
        mesh = Mesh(world, dp=1, tp=world.size)
        model = tensor_parallel(net(), mesh.comm("tp"), plan=PLAN)
        wrapped = Wrapped(
            wrapper, mesh.comm("dp"), model, slice(None), **{"units": None} if wrapper == "fsdp" else {}
        )
        train(
            wrapped.called, wrapped.optimizer, clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        )
        return full_state_dict(model, world)

    return do


CLIPPED |= {
    f"torch's clip under tp and {wrapper}": Misuse(
        clipped_on_a_mesh(wrapper), clipped_in_one_process, r"minipar\.clip_grad_norm_"
    )
    for wrapper in ("ddp", "zero", "fsdp")
}


# Optimizers made before --------------------------------------------------------------------------------------------------


def optimizer_before(wrapper, kind=sgd, steps_before=0, own=None):
    def do(world=None):
        model = net()
        optimizer = kind(model)
        train(model, optimizer, steps=steps_before)
        wrapped = Wrapped(wrapper, world, model, own)
        train(wrapped.called, optimizer, wrapped.own)
        return wrapped.state()

    return do


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)


def adam_in_one_process(steps_before):
    return optimizer_before(None, adam, steps_before, slice(None))


BEFORE = {
    "an optimizer made before DDP": Misuse(optimizer_before("ddp"), one_process, RIGHT),
    "an optimizer made before FSDP": Misuse(optimizer_before("fsdp"), one_process, f"^{RIGHT}$|optimizer"),
    "an Adam made before FSDP": Misuse(
        optimizer_before("fsdp", adam), adam_in_one_process(0), f"^{RIGHT}$|optimizer"
    ),
    "an Adam that has stepped before FSDP": Misuse(
        optimizer_before("fsdp", adam, 1),
        adam_in_one_process(1),
        "optimizer",
    ),
    "an optimizer made before the cut": Misuse(optimizer_before("tp"), one_process, f"^{RIGHT}$|optimizer"),
}


# Ranks that differ -------------------------------------------------------------------------------------------------------


def models_differ(other):
    return lambda world: Wrapped("tp", world, net() if world.rank == 0 else other()).train()


# Under DDP, ZeRO and FSDP, test_arguments.py has all that may differ; here is one of each kind for tensor parallelism.
OTHERS = {
    "another hidden size": lambda: net(hidden=16),
    "one more layer": lambda: net().append(nn.Linear(4, 4).double()),
    "another dtype": lambda: net(torch.float32),
    "a frozen layer": lambda: freeze_first(net()),
    "transposed weights": lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(4, 8)).double(),
    "another class": lambda: nn.Sequential(nn.Linear(6, 8).double(), nn.Tanh(), nn.Linear(8, 4, bias=False).double()),
}  # fmt: skip
DIFFER = {
    f"{what} on rank 1 under tp": Misuse(
        models_differ(other), one_process, r"ValueError: the ranks' (models|parameters or options) differ: "
    )
    for what, other in OTHERS.items()
} | {
    "another seed on rank 1 under tp": Misuse(
        models_differ(lambda: net(seed=1)), one_process, rf"^{RIGHT}$|ValueError: .*differ"
    )
}


def plans_differ(world):
    return Wrapped("tp", world, plan=PLAN if world.rank == 0 else {}).train()


def other_rows(world):
    return Wrapped("tp", world, own=of(world)).train()


DIFFER |= {
    "another plan on rank 1": Misuse(plans_differ, one_process, "ValueError: the ranks' .*differ"),
    "each tp rank has rows of its own": Misuse(other_rows, one_process, "(?i)error: .*(batch|input|differ)"),
}


# Changes after wrapping --------------------------------------------------------------------------------------------------


def changed(wrapper, change, own=None):
    def do(world=None):
        wrapped = Wrapped(wrapper, world, square(), own)
        wrapped.train()
        change(wrapped)
        return wrapped.train()

    return do


def cast(wrapped):
    wrapped.called.float()


def cast_and_back(wrapped):
    wrapped.called.bfloat16().double()


def replace_parameter(wrapped):
    value = torch.full((6, 6), 0.1, dtype=torch.float64)
    wrapped.model[2].weight = nn.Parameter(value)


def replace_module(wrapped):
    torch.manual_seed(5)
    wrapped.model[2] = nn.Linear(6, 6).double()


def replace_data(wrapped):
    for p in wrapped.model.parameters():
        p.data = p.data.clone()


def freeze_first(model):
    model[0].requires_grad_(False)
    return model


def retie(wrapped):
    wrapped.model[2].weight = wrapped.model[0].weight


# Change -> it, and what is said under DDP, ZeRO, FSDP and tensor parallelism; None where it is a plain error of torch.
CAST = "was cast from torch.float64 to torch.float32 after it was wrapped; cast the model first"
CHANGES = {
    "cast": (cast, CAST, CAST, "replaced", RIGHT),
    "cast there and back": (cast_and_back, RIGHT, "replaced", "replaced", RIGHT),
    "data replaced": (
        replace_data,
        RIGHT,
        "of 2.bias was replaced",
        "of 0.weight, in unit '0', was replaced",
        RIGHT,
    ),
    "frozen": (lambda wrapped: freeze_first(wrapped.model), RIGHT, RIGHT, RIGHT, RIGHT),
    "a parameter replaced": (replace_parameter, RIGHT, RIGHT, "2.weight was added or replaced", None),
    "a module replaced": (replace_module, RIGHT, RIGHT, "2.weight was added or replaced", None),
    "tied": (retie, RIGHT, RIGHT, "replaced|belongs to", None),
}
CHANGED = {
    f"{what} after wrapping in {wrapper}": Misuse(
        changed(wrapper, change), changed(None, change, slice(None)), said
    )
    for what, (change, *says) in CHANGES.items()
    for wrapper, said in zip(WRAPPERS, says)
    if said is not None
}


# A plan that forgets something -------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Two matrices, and between them what the plan doesn't name."""

    def __init__(self, between, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8, bias=bias).double(), nn.Linear(8, 4).double()
        self.between = between.double()

    def forward(self, x):
        return self.down(self.between(self.up(x)))


class Times(nn.Module):
    """A factor per feature, or one for all of them."""

    def __init__(self, *shape):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, shape[0] if shape else 1).reshape(shape))

    def forward(self, x):
        return x * self.factor


class PerHead(nn.Module):
    """A norm of each head."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x.unflatten(-1, (-1, 4))).flatten(-2)


BETWEEN = {
    "a factor for all features": lambda: Times(),
    "a factor per feature": lambda: Times(8),
    "a norm of all features": lambda: nn.LayerNorm(8),
    "a norm of each head": PerHead,
    "a PReLU": nn.PReLU,
    "a matrix": lambda: nn.Linear(8, 8),
}


def forgotten(between):
    def do(world):
        model = Scaled(between())
        tensor_parallel(model, world, plan={"up": Column(unit=4), "down": "row"})
        train(model, sgd(model))
        return full_state_dict(model, world)

    return do


FORGOTTEN = {
    f"{what} between a column and a row": Misuse(
        forgotten(between), lambda between=between: one_process(Scaled(between())), rf"^{RIGHT}$|Error: .*between"
    )
    for what, between in BETWEEN.items()
}  # fmt: skip

SAVED = {
    "saving a split model by state_dict": Misuse(
        lambda world: Wrapped("tp", world).model.state_dict(), lambda: net().state_dict(), "full_state_dict"
    ),
    "saving FSDP by state_dict": Misuse(
        lambda world: Wrapped("fsdp", world).called.state_dict(),
        lambda: net().state_dict(),
        "full_state_dict",
    ),
}
MISUSES = {**CLIPPED, **BEFORE, **DIFFER, **CHANGED, **SAVED, **FORGOTTEN}


def outcome(world, name):
    """What is said on this rank: RIGHT, or the refusal, or what is wrong."""
    misuse = MISUSES[name]
    try:
        got = misuse.do(world)
    except (ValueError, RuntimeError, TypeError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    try:
        for key, want in misuse.like().items():
            rtol = 1e-10 if want.dtype == torch.float64 else 1e-5
            assert_equal_to(got[key].as_subclass(torch.Tensor), want, rtol, what=key)
    except (AssertionError, KeyError, TypeError) as difference:
        return f"wrong without a word: {difference!r}"
    return RIGHT


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_right_or_refused_by_name(name):
    for said in minipar.run(outcome, name, world_size=2, timeout_s=10):
        assert is_said(name, said), said


def is_said(name, said):
    wanted = MISUSES[name].said
    return said == RIGHT if wanted == RIGHT else re.search(wanted, said) and "without a word" not in said


SAMPLE = [
    "torch's clip under tp",
    "an optimizer made before the cut",
    "another hidden size on rank 1 under tp",
    "another plan on rank 1",
    "cast after wrapping in zero",
    "saving FSDP by state_dict",
]


@pytest.mark.thorough
def test_misuses_are_refused_under_torchrun_too(tmp_path):
    root = Path(__file__).parents[2]
    program = Program(
        tmp_path,
        f"""
        import sys
        sys.path.insert(0, {str(root)!r})
        import minipar
        from tests.data_parallel.test_misuse import SAMPLE, outcome
        world = minipar.init_from_env(timeout_s=20)
        for name in SAMPLE:
            said = outcome(world, name).replace(chr(10), " ")
            print(f"{{name}}\\t{{said}}\\n", end="", flush=True)
        """,
        launcher=(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--log-dir", str(tmp_path / "logs")),
        ),
    )
    status, out, err = program.finish()
    assert status == 0, err
    lines = [line.split("\t") for line in out.splitlines()]
    assert sorted(name for name, _ in lines) == sorted([*SAMPLE, *SAMPLE])
    for name, said in lines:
        assert is_said(name, said), said
