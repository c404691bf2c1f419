"""What a local tensor is a part of: slicing, writing back, gathering, resharding; every composition of cuts."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.mesh import Mesh, Placement, gather, overlap, place_whole, placement_of, set_placement
from minipar.mesh.regions import boxes_of_range
from tests.examples import examples
from tests.strategies import mesh_sizes, num_ranks, shapes, splits

many = examples(200)  # a draw costs a millisecond


def numbered(shape) -> torch.Tensor:
    """Every element is its own place, so equal tensors are equal parts."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@st.composite
def cuts(draw, dims: int, most: int = 3):
    """Functions that cut a placement, and the same for a tensor: (placement -> placement, tensor -> tensor)."""
    steps = []
    for _ in range(draw(st.integers(0, most)) if dims else 0):
        dim, count = draw(st.integers(0, dims - 1)), draw(st.integers(1, 4))
        steps.append((dim, draw(st.integers(0, count - 1)), count))
    return steps


def composed(shape, steps, flat) -> Placement:
    placement = Placement.whole("w", shape)
    for dim, index, count in steps:
        placement = placement.shard(dim, index, count)
    for first, last in flat:
        n = placement.numel
        placement = placement.flatten_range(int(first * n), max(int(first * n), int(last * n)))
    return placement


fractions = st.integers(0, 12).map(lambda twelfths: twelfths / 12)
flats = st.lists(st.tuples(fractions, fractions).map(sorted), max_size=2)


@many
@given(shapes(), st.data(), flats)
def test_a_composition_of_cuts_is_the_cuts_one_after_another(shape, data, flat):
    steps = data.draw(cuts(len(shape)))
    local = full = numbered(shape)
    for dim, index, count in steps:
        chunks = local.chunk(count, dim)  # may return fewer: then the rest are empty
        local = chunks[index] if index < len(chunks) else local.narrow(dim, 0, 0)
    for first, last in flat:
        local = local.reshape(-1)
        start = int(first * local.numel())
        local = local[start : max(start, int(last * local.numel()))]
    placement = composed(shape, steps, flat)
    assert placement.local_shape == tuple(local.shape)
    assert placement.numel == local.numel()
    assert torch.equal(placement.slice_of(full), local)


@many
@given(shapes(max_dims=3), st.data())
def test_split_cuts_inside_what_was_split_before(shape, data):
    full = local = numbered(shape)
    placement = Placement.whole("w", shape)
    for dim in range(-len(shape), len(shape)):  # every dim twice
        before, keep, _ = data.draw(splits(local.shape[dim], 3))
        placement, local = placement.split(dim, before, keep), local.narrow(dim, before, keep)
    assert torch.equal(placement.slice_of(full), local)


@many
@given(mesh_sizes(max_ranks=16, axes=("dp", "cp", "tp")), shapes(min_dims=1), st.data())
def test_what_the_ranks_of_a_mesh_hold_gathers_to_the_whole(sizes, shape, data):
    """tp cuts a dim, dp a range of the block, cp holds copies: as ZeRO-3 inside tensor parallelism does."""
    mesh, full = Mesh(num_ranks(sizes), **sizes), numbered(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = []
    for rank in data.draw(st.permutations(range(num_ranks(sizes)))):
        at = mesh.coordinates_of(rank)
        block = Placement.whole("w", shape).shard(dim, at.tp, sizes["tp"])
        bounds = [block.numel * i // sizes["dp"] for i in (at.dp, at.dp + 1)]
        placement = block.flatten_range(*bounds).replicate("cp")
        parts.append((placement, placement.slice_of(full)))
    assert sum(p.numel for p, _ in parts) == full.numel() * sizes["cp"]
    assert torch.equal(gather(parts), full)


@many
@given(shapes(), st.data(), flats)
def test_writing_a_slice_back_changes_its_own_elements_and_no_other(shape, data, flat):
    placement = composed(shape, data.draw(cuts(len(shape))), flat)
    full = numbered(shape)
    written = torch.full_like(full, -1)
    placement.write_into(written, placement.slice_of(full))
    assert sorted(written[written >= 0].tolist()) == sorted(placement.slice_of(full).reshape(-1).tolist())
    assert torch.equal(written[written >= 0], full[written >= 0])


@many
@given(shapes(max_dims=4), fractions, fractions)
def test_a_flat_range_is_at_most_2d_minus_1_boxes_in_order(shape, first, last):
    n = torch.Size(shape).numel()
    start, stop = sorted((int(first * n), int(last * n)))
    boxes = list(boxes_of_range(shape, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    full = numbered(shape)
    elements = [full[box.slices((0,) * len(shape))].reshape(-1).tolist() for box in boxes]
    assert list(itertools.chain(*elements)) == list(range(start, stop))


@many
@given(shapes(max_dims=3, max_side=4), st.data(), flats, flats)
def test_the_overlap_of_two_placements_is_the_elements_both_hold(shape, data, flat_a, flat_b):
    full = numbered(shape)
    a = composed(shape, data.draw(cuts(len(shape))), flat_a)
    b = composed(shape, data.draw(cuts(len(shape))), flat_b)
    x, y = a.slice_of(full), b.slice_of(full)
    copied = torch.full_like(y, -1)
    for box, p, q in overlap(a, b):
        q.of_local(copied, box).copy_(p.of_local(x, box))
    shared = set(x.reshape(-1).tolist()) & set(y.reshape(-1).tolist())
    assert sorted(copied[copied >= 0].tolist()) == sorted(shared)
    assert sum(box.numel for box, _, _ in overlap(a, b)) == len(shared)
    assert torch.equal(copied[copied >= 0], y[copied >= 0])


@many
@given(shapes(max_dims=3, max_side=3), st.data(), flats, flats)
def test_parts_are_equal_exactly_when_their_elements_are(shape, data, flat_a, flat_b):
    full = numbered(shape)
    a = composed(shape, data.draw(cuts(len(shape))), flat_a)
    b = composed(shape, data.draw(cuts(len(shape))), flat_b)
    same = a.slice_of(full).reshape(-1).tolist() == b.slice_of(full).reshape(-1).tolist()
    assert (a.part == b.part) == same


def test_resharding_from_one_layout_to_another_needs_no_whole_tensor():
    shape, full = (7, 5), numbered((7, 5))
    whole = Placement.whole("w", shape)
    old = [whole.shard(0, t, 2).flatten_range(*r) for t, r in ((0, (0, 9)), (0, (9, 20)), (1, (0, 15)))]
    new = [whole.shard(1, t, 3) for t in range(3)]
    stored = [(p, p.slice_of(full).clone()) for p in old]
    for target in new:
        local = torch.full(target.local_shape, -1)
        for source, x in stored:
            for box, p, q in overlap(source, target):
                q.of_local(local, box).copy_(p.of_local(x, box))
        assert torch.equal(local, target.slice_of(full))


def test_a_block_is_a_view_and_so_is_a_range_of_one_box():
    full = torch.zeros(4, 6)
    whole = Placement.whole("w", full.shape)
    for placement in (
        whole.shard(1, 1, 2),
        whole.flatten_range(6, 18),
        whole.shard(0, 1, 2).flatten_range(1, 5),
    ):
        placement.slice_of(full).fill_(1)
        assert full.sum().item() == placement.numel
        full.zero_()


def test_bf16_and_non_contiguous_parts_are_written_back():
    full = torch.randn(4, 6, dtype=torch.bfloat16)
    whole = Placement.whole("w", full.shape)
    left, right = whole.shard(1, 0, 2), whole.shard(1, 1, 2).flatten_range(0, 12)
    strided = torch.stack([right.slice_of(full)] * 2, dim=1)[:, 0]
    assert not strided.is_contiguous()
    transposed = left.slice_of(full).t().contiguous().t()
    copy_of_left = left.slice_of(full).contiguous()
    assert torch.equal(gather([(left, transposed), (right, strided), (left, copy_of_left)]), full)
    assert torch.equal(gather([(right, strided), (left, copy_of_left), (left, transposed)]), full)


def test_gaps_overlaps_strangers_and_unequal_copies_are_refused():
    full = numbered((4, 3))
    whole = Placement.whole("layers.0.w", full.shape)
    top, bottom = whole.shard(0, 0, 2), whole.shard(0, 1, 2)
    late = whole.flatten_range(5, 12)

    def message(*parts, **options):
        with pytest.raises(ValueError) as refusal:
            gather(parts, **options)
        return str(refusal.value)

    def part(placement):
        return placement, placement.slice_of(full)

    assert "layers.0.w: 6 of 12 elements are in no part, the first at (2, 0)" in message(part(top))
    assert "layers.0.w: Box(start=(1, 2), length=(1, 1)) overlaps" in message(part(top), part(late))
    assert "layers.0.w: copies of" in message(part(top), part(bottom), (top, full[:2] + 1))
    assert "it should be (2, 3)" in message((top, full[:1]))
    assert "layers.1.w" in message(part(top), (Placement.whole("layers.1.w", (4, 3)), full))
    assert "torch.float32" in message(part(top), (bottom, full[2:].float()))
    assert "no parts" in message()
    assert torch.equal(gather([part(top), part(bottom), (top, full[:2] + 1)], check_replicas=False), full)


def test_copies_with_equal_nans_agree_and_repeats_are_allowed():
    whole = Placement.whole("w", (2,))
    x = torch.tensor([1.0, float("nan")])
    assert gather([(whole, x), (whole.replicate("dp"), x.clone()), (whole, x)]).isnan().tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda w: w.split(0, 3, 2), "w: [3, 5) is not inside [0, 4) of dim 0"),
        (lambda w: w.split(0, 1, -1), "w: [1, 0) is not inside"),
        (lambda w: w.split(2, 0, 1), "w: dim=2 is not a dim of shape (4, 3)"),
        (lambda w: w.shard(0, 2, 2), "w: index=2 is not one of 2 shards; use 0 to 1"),
        (lambda w: w.flatten_range(0, 13), "w: [0, 13) is not inside [0, 12)"),
        (lambda w: w.flatten_range(2, 6).flatten_range(0, 5), "w: [0, 5) is not inside [0, 4)"),
        (lambda w: w.flatten_range(2, 6).split(0, 0, 1), "w: flat=(2, 6) cannot be split"),
        (lambda w: w.flatten_range(2, 6).shard(0, 0, 1), "w: flat=(2, 6) cannot be split"),
        (lambda w: w.slice_of(torch.zeros(3, 4)), "w: the global tensor has shape (3, 4)"),
        (lambda w: w.write_into(torch.zeros(4, 3), torch.zeros(3)), "w: the local tensor has shape (3,)"),
        (lambda w: Placement("w", (4, 3), (0,), (4,)), "differ in dims"),
        (lambda w: Placement("w", (4,), (2,), (3,)), "w: [2, 5) is not inside [0, 4)"),
        (lambda w: list(overlap(w, Placement.whole("v", (4, 3)))), "not one tensor"),
    ],
)
def test_a_cut_outside_what_it_cuts_is_refused_by_name(cut, message):
    with pytest.raises(ValueError) as refusal:
        cut(Placement.whole("w", (4, 3)))
    assert message in str(refusal.value)


def test_placements_are_values():
    whole = Placement.whole("w", torch.zeros(4, 3).shape)
    assert whole.replicate("dp").replicate("cp") == whole.replicate("cp", "dp")
    assert len({whole, Placement.whole("w", [4, 3]), whole.tie("v"), whole.shard(0, 0, 2)}) == 3
    assert pickle.loads(pickle.dumps(whole.tie("v"))) == whole.tie("v")


def test_a_placement_stays_until_its_parameter_is_replaced():
    module = torch.nn.Linear(3, 4)
    place_whole(module)
    weight = module.weight
    assert placement_of(weight) == Placement.whole("weight", (4, 3))
    top = placement_of(weight).shard(0, 0, 2)
    weight.data = top.slice_of(weight.data).clone()
    set_placement(weight, top)
    place_whole(module.to(torch.float64))  # leaves what is there
    assert placement_of(module.weight) == top
    assert placement_of(pickle.loads(pickle.dumps(module)).weight) == top
    with pytest.raises(ValueError, match=r"shape \(2, 3\) has no placement"):
        placement_of(copy.deepcopy(module).weight)
    with pytest.raises(ValueError, match=r"the local tensor has shape \(2, 3\), it should be \(4, 3\)"):
        set_placement(weight, Placement.whole("weight", (4, 3)))


def test_placements_record_a_modules_experts_and_tied_copies():
    module = torch.nn.ModuleDict({"dense": torch.nn.Linear(3, 4), "experts": torch.nn.Linear(3, 4)})
    module["experts"].has_expert_parameters, module.tied_copies = True, {"dense.bias": "first.bias"}
    place_whole(module, "model.")
    found = {name: placement_of(param) for name, param in module.named_parameters()}
    assert {name: (p.name, p.expert, p.tied_to) for name, p in found.items()} == {
        "dense.weight": ("model.dense.weight", False, None),
        "dense.bias": ("model.dense.bias", False, "first.bias"),
        "experts.weight": ("model.experts.weight", True, None),
        "experts.bias": ("model.experts.bias", True, None),
    }


def test_a_tied_parameter_has_one_placement_by_its_first_name():
    module = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    module[1].weight = module[0].weight
    place_whole(module)
    assert placement_of(module[1].weight).name == "0.weight"


@given(st.permutations(range(6)), st.integers(1, 3), flats, st.booleans())
def test_rows_that_are_not_consecutive_are_parts_like_others(order, count, flat, cut):
    """Of a tensor whose entries of dim 0 are dealt out in any order, perhaps after a cut along another dim."""
    full, parts = numbered((6, 4, 2)), []
    for rank in range(count):
        whole = Placement.whole("w", (6, 4, 2)).shard(0, rank, count)
        rows = order[whole.start[0] : whole.start[0] + whole.length[0]]
        placement = (whole.split(1, 1, 2) if cut else whole).with_rows(rows)
        local = full[list(rows), 1:3] if cut else full[list(rows)]
        assert torch.equal(placement.slice_of(full), local)
        parts.append((placement, local))
        for first, last in flat:
            local = local.reshape(-1)
            span = (int(first * local.numel()), int(last * local.numel()))
            placement, local = placement.flatten_range(*span), local[slice(*span)]
        assert torch.equal(placement.slice_of(full), local)
        assert sum(piece.box.numel for piece in placement.pieces()) == placement.numel
    if not cut:
        assert torch.equal(gather(parts), full)


def test_rows_that_a_tensor_does_not_have_are_refused():
    placement = Placement.whole("w", (4, 2)).shard(0, 1, 2)
    for rows, why in (((0, 4), "is not inside"), ((1, 1), "different entries"), ((0,), "are not 2")):
        with pytest.raises(ValueError, match=why):
            placement.with_rows(rows)
    with pytest.raises(ValueError, match="split before they are moved"):
        placement.with_rows((0, 3)).split(0, 0, 1)
