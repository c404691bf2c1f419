"""What all ranks must have in common is compared when a wrapper is made, and a difference is told by name."""

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, ZeroOptimizer
from minipar.data_parallel.arguments import require_same_parameters
from minipar.mesh import Placement, set_placement


class InOrder(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4, bias=False))


# What differs -> (the model of a rank, what the error says).
MODELS = {
    "one more layer": (lambda r: nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + r)]), "1.weight{} is missing"),
    "width": (lambda r: nn.Linear(4, 4 + r), r"weight{} is \(4, 4\) .* on rank 0, and \(5, 4\)"),
    "transposed": (lambda r: nn.Linear(*[(4, 6), (6, 4)][r], bias=False), r"weight{} is \(6, 4\).*and \(4, 6\)"),
    "order": (lambda r: InOrder(["ab", "ba"][r]), "in their order, rank 0 has a.weight{}.*rank 1 has b.weight"),
    "dtype": (lambda r: nn.Linear(2, 2, dtype=[torch.float32, torch.float64][r]), "weight{} .*float32.*and.*float64"),
    "frozen": (lambda r: nn.Linear(2, 2).requires_grad_(r == 0), "weight{} .*trained.*and.*frozen"),
    "names": (lambda r: nn.ModuleDict({"xy"[r]: nn.Linear(2, 2)}), "x.weight{} is .* and missing on rank 1"),
}  # fmt: skip
# What differs -> (options of a rank, what the error says); {} elsewhere.
OPTIONS = {
    "reduce": (lambda r: {"reduce": ["mean", "sum"][r]}, "reduce is mean on rank 0, and sum on rank 1"),
    "bucket": (lambda r: {"bucket_mb": 1.0 + r}, "bucket_mb is 1.0 on rank 0, and 2.0 on rank 1"),
    "reduce dtype": (lambda r: {"reduce_dtype": [None, torch.float64][r]}, "reduce_dtype is None .*float64"),
}
OF_DDP = {
    "buffers": (lambda r: {"broadcast_buffers": r == 0}, "broadcast_buffers is True .*False"),
    "reduction": (lambda r: {"reduce_bucket": [None, print][r]}, "reduce_bucket is False .*True"),
}
OF_ZERO = {
    "stage": (lambda r: {"stage": 1 + r}, "stage is 1 on rank 0, and 2 on rank 1"),
    "lr": (lambda r: {"lr": 0.1 * (1 + r)}, "lr is 0.1 on rank 0, and 0.2 on rank 1"),
    "class": (
        lambda r: {"optimizer_cls": [torch.optim.SGD, torch.optim.Adam][r]},
        "optimizer_cls is SGD .*Adam",
    ),
}


def ddp(model, world, **options):
    return DDP(model, world, **options)


def zero(model, world, **options):
    return ZeroOptimizer(
        model.named_parameters(), comm=world, **{"optimizer_cls": torch.optim.SGD, **options}
    )


def refusals(world, make, options):
    said = {}
    for what, (model, _) in MODELS.items():
        with pytest.raises(ValueError) as error:
            make(model(world.rank), world)
        said[what] = str(error.value)
    for what, (different, _) in options.items():
        with pytest.raises(ValueError) as error:
            make(nn.Linear(2, 2), world, **different(world.rank))
        said[what] = str(error.value)
    return said


@pytest.mark.parametrize(
    ("make", "options", "of"), [(ddp, OPTIONS | OF_DDP, ""), (zero, OPTIONS | OF_ZERO, " of group 0")]
)
def test_ranks_that_differ_are_told_by_name_at_construction(make, options, of):
    zeroth, first = minipar.run(refusals, make, options, world_size=2)
    assert zeroth == first
    for what, (_, says) in (MODELS | options).items():
        with pytest.raises(ValueError, match=says.format(of)):
            raise ValueError(zeroth[what])


def other_refusals(world):
    said = []
    batch_norm = nn.BatchNorm1d(4, track_running_stats=world.rank == 0)
    with pytest.raises(ValueError, match="running_mean is .* on rank 0, and missing on rank 1"):
        DDP(batch_norm, world)
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
    return said


def test_buffers_parts_and_added_groups_are_compared_too():
    minipar.run(other_refusals, world_size=2)


def bytes_of_a_comparison(world):
    require_same_parameters(
        lambda _: world, nn.Linear(3, 3).named_parameters(), {"reduce": "mean", "f": print}
    )
    return world.traffic.sent_bytes


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_comparison_sends_sixteen_bytes_to_each_other_rank(size):
    assert minipar.run(bytes_of_a_comparison, world_size=size) == [16 * (size - 1)] * size
