"""What all ranks must have in common is compared when a wrapper is made, and a difference is told by name."""

import re
from functools import partial

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.data_parallel.arguments import require_same_parameters
from minipar.mesh import Placement, set_placement


class InOrder(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4, bias=False))


# What differs -> (the model of a rank, what the error says); {} is what the wrapper says of a parameter's place.
MODELS = {
    "one more layer": (
        lambda r: nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + r)]),
        "1.weight{} is missing",
    ),
    "width": (lambda r: nn.Linear(4, 4 + r), r"weight{} is \(4, 4\) .* on rank 0, and \(5, 4\)"),
    "transposed": (
        lambda r: nn.Linear(*[(4, 6), (6, 4)][r], bias=False),
        r"weight{} is \(6, 4\).*and \(4, 6\)",
    ),
    "order": (
        lambda r: InOrder(["ab", "ba"][r]),
        "in their order, rank 0 has a.weight{}.*rank 1 has b.weight",
    ),
    "dtype": (
        lambda r: nn.Linear(2, 2, dtype=[torch.float32, torch.float64][r]),
        "weight{} .*float32.*and.*float64",
    ),
    "frozen": (lambda r: nn.Linear(2, 2).requires_grad_(r == 0), "weight{} .*trained.*and.*frozen"),
    "names": (lambda r: nn.ModuleDict({"xy"[r]: nn.Linear(2, 2)}), "x.weight{} is .* and missing on rank 1"),
}
NO_BUFFER = {
    "no buffer": (
        lambda r: nn.BatchNorm1d(4, track_running_stats=r == 0),
        "running_mean is .* missing on rank 1",
    )
}
NO_VALUES = {
    "no values": (lambda r: nn.Linear(4, 4, device=["cpu", "meta"][r]), "on_meta_device is False on rank 0")
}
# What differs -> (options of a rank, what the error says).
OPTIONS = {
    "reduce": (lambda r: {"reduce": ["mean", "sum"][r]}, "reduce is mean on rank 0, and sum on rank 1"),
    "reduce dtype": (lambda r: {"reduce_dtype": [None, torch.float64][r]}, "reduce_dtype is None .*float64"),
    "reduction": (lambda r: {"reduce_bucket": [None, print][r]}, "reduce_bucket is False .*True"),
}
BUCKET = {"bucket": (lambda r: {"bucket_mb": 1.0 + r}, "bucket_mb is 1.0 on rank 0, and 2.0 on rank 1")}
BUFFERS = {"buffers": (lambda r: {"broadcast_buffers": r == 0}, "broadcast_buffers is True .*False")}
OF_ZERO = {
    "stage": (lambda r: {"stage": 1 + r}, "stage is 1 on rank 0, and 2 on rank 1"),
    "lr": (lambda r: {"lr": 0.1 * (1 + r)}, "lr is 0.1 on rank 0, and 0.2 on rank 1"),
    "class": (
        lambda r: {"optimizer_cls": getattr(torch.optim, ["SGD", "Adam"][r])},
        "optimizer_cls is SGD .*Adam",
    ),
}
OF_FSDP = {
    "units": (lambda r: {"units": [None, nn.Linear][r]}, "0.weight in unit 'root' is"),
    "reshard": (lambda r: {"reshard_after_forward": r == 0}, "reshard_after_forward is True on rank 0, and False"),
    "dtype of products": (lambda r: {"compute_dtype": [None, torch.bfloat16][r]}, "compute_dtype is None"),
}  # fmt: skip


def zero(model, world, **options):
    return ZeroOptimizer(
        model.named_parameters(), comm=world, **{"optimizer_cls": torch.optim.SGD, **options}
    )


# Wrapper -> (how it wraps, models, options, what it says of a parameter's place).
WRAPPERS = {
    "ddp": (DDP, MODELS | NO_BUFFER, OPTIONS | BUCKET | BUFFERS, ""),
    "zero": (zero, MODELS, OPTIONS | BUCKET | OF_ZERO, " of group 0"),
    "fsdp": (FSDP, MODELS | NO_BUFFER | NO_VALUES, OPTIONS | BUFFERS | OF_FSDP, " in unit 'root'"),
}


def refusals(world, wrapper):
    make, models, options, _ = WRAPPERS[wrapper]
    of_rank = [partial(make, model(world.rank)) for model, _ in models.values()]
    of_rank += [
        partial(make, nn.Sequential(nn.Linear(2, 2)), **own(world.rank)) for own, _ in options.values()
    ]
    said = []
    for wrap in of_rank:
        with pytest.raises(ValueError) as error:
            wrap(world)
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_that_differ_are_told_by_name_at_construction(wrapper):
    zeroth, first = minipar.run(refusals, wrapper, world_size=2)
    assert zeroth == first
    _, models, options, place = WRAPPERS[wrapper]
    for said, (_, says) in zip(zeroth, [*models.values(), *options.values()], strict=True):
        assert said.startswith("the ranks' parameters or options differ: ")
        assert re.search(says.format(place), said), said


def other_refusals(world):
    part = nn.Parameter(torch.zeros(2, 4))
    set_placement(part, Placement.whole("weight", (4, 4)).split(0, 2 * world.rank, 2))
    with pytest.raises(ValueError, match=r"weight is \(2, 4\) of \(4, 4\) at \(0, 0\).*at \(2, 0\)"):
        require_same_parameters(lambda _: world, [("weight", part)])
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    grouped = [{"params": [("a", a)]}, {"params": [("b", b)]}]
    with pytest.raises(ValueError, match="lr of group 1 is 0.001 on rank 0, and missing on rank 1"):
        ZeroOptimizer([[*grouped], [{"params": [("a", a), ("b", b)]}]][world.rank], torch.optim.SGD, world)
    zero = ZeroOptimizer([("a", a)], torch.optim.SGD, world)
    with pytest.raises(ValueError, match="lr of group 1 is 0.5 on rank 0, and 0.7 on rank 1"):
        zero.add_param_group({"params": [("b", b)], "lr": [0.5, 0.7][world.rank]})


def test_parts_and_added_groups_are_compared_too():
    minipar.run(other_refusals, world_size=2)


def bytes_of_a_comparison(world):
    require_same_parameters(
        lambda _: world, nn.Linear(3, 3).named_parameters(), {"reduce": "mean", "f": print}
    )
    return world.traffic.sent_bytes


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_comparison_sends_sixteen_bytes_to_each_other_rank(size):
    assert minipar.run(bytes_of_a_comparison, world_size=size) == [16 * (size - 1)] * size


# (function that wraps, options, what the error says).
WRONG = [
    (DDP, dict(reduce="max"), "reduce='max'"),
    (DDP, dict(bucket_mb=0), "bucket_mb=0"),
    (DDP, dict(bucket_mb=-1.0), "bucket_mb=-1.0"),
    (DDP, dict(first_bucket_mb=0), "first_bucket_mb=0"),
    (zero, dict(stage=3), "stage=3"),
    (zero, dict(stage=0), "stage=0"),
    (zero, dict(optimizer_cls=torch.optim.LBFGS), "optimizer_cls=LBFGS"),
    (zero, dict(optimizer_cls=torch.optim.Adafactor), "optimizer_cls=Adafactor"),
    (zero, dict(reduce="max"), "reduce='max'"),
    (zero, dict(bucket_mb=0), "bucket_mb=0"),
    (zero, dict(offload="tape"), "offload='tape'"),
    (zero, dict(folder="x"), "folder='x' is for states in a file; use offload='disk'"),
    (FSDP, dict(reduce="max"), "reduce='max'"),
    (FSDP, dict(units=nn.Conv2d), "matches no module inside Sequential"),
    (FSDP, dict(units=lambda m: False), "matches no module"),
    (FSDP, dict(offload="tape"), "offload='tape'"),
]


@pytest.mark.parametrize(("wrap", "wrong", "says"), WRONG)
def test_bad_arguments_are_refused_by_name(wrap, wrong, says):
    with pytest.raises(ValueError, match=says):
        wrap(nn.Sequential(nn.Linear(2, 2)), lambda p: None, **wrong)  # before anything is asked of a Comm
