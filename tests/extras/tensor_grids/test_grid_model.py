"""A model on a grid or a cube of ranks is the model of one process; what it sends and holds is what the formulas say."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minipar
from minipar.comm import autograd
from minipar.config.model_config import ModelConfig
from minipar.cost.activations import layer_activation_bytes
from minipar.cost.models import ModelShape
from minipar.extras.tensor_grids import grid_layout, grid_model
from minipar.extras.tensor_grids.grid_costs import grid_step_elems
from minipar.extras.tensor_grids.grid_model import grid_parallel
from minipar.extras.tensor_grids.limits import check_grid, grid_shape
from minipar.mesh import gather, placement_of
from minipar.tensor_parallel import full_state_dict
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds
from tests.tensor_parallel.programs import assert_gradients_equal
from tests.tensor_parallel.strategies import Case, bytes_kept

FLOAT64 = 8


class OnGrid(NamedTuple):
    """A case, and the grid of `case.tp` ranks that it is cut over."""

    case: Case
    layout: str
    depth: int = 1

    def cut(self, world, algorithm: str = "auto", **stage):
        return grid_parallel(self.case.model(**stage), world, self.layout, self.depth, algorithm)

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.case.tp}"


def on(layout: str, tp: int, depth: int = 1, batch: int = 4, **config) -> OnGrid:
    sizes = dict(vocab_size=16, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=12)
    case = Case(ModelConfig(**sizes | dict(dropout=0.3) | config), tp, False, batch, length=4, seed=5)
    return OnGrid(case, layout, depth)


FOUR, DEEP, CUBE = on("2d", 4), on("2.5d", 8, 2), on("3d", 8)
ALL = [FOUR, DEEP, CUBE]
on_each = pytest.mark.parametrize("grid", ALL, ids=lambda grid: grid.name)

GRIDS = [("2d", 4, 1), ("2.5d", 8, 2), ("3d", 8, 1), ("2.5d", 2, 2), ("3d", 1, 1)]


@st.composite
def grids(draw, kinds=GRIDS):
    """A small model that a grid can cut, with sizes that differ, so that no two dims can be confused."""
    layout, tp, depth = draw(st.sampled_from(kinds))
    rows, side = grid_shape(tp, layout, depth)
    parts = side**2 if layout == "3d" else side
    kv_heads, few = side * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    config = ModelConfig(
        vocab_size=parts * draw(st.integers(2, 5)),
        dim=kv_heads * few * draw(st.sampled_from([4, 8])),
        num_layers=draw(st.integers(1, 2)),
        num_heads=kv_heads * few,
        num_kv_heads=kv_heads,
        hidden_dim=parts * draw(st.integers(1, 5)),
        max_seq_len=64,
        tie_embeddings=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        attention=draw(st.sampled_from(["fused", "plain", "flash"])),
        documents=draw(st.booleans()),
        parallel_block=draw(st.booleans()),
    )
    batch, length = rows * draw(st.integers(1, 2)), draw(st.integers(1, 5))
    algorithm = draw(st.sampled_from(["auto", "ring", "native"]))
    return OnGrid(Case(config, tp, False, batch, length, draw(seeds), algorithm), layout, depth)


def compare(world, grid: OnGrid) -> None:
    case = grid.case
    model, oracle = grid.cut(world, case.algorithm), case.model()
    tokens, targets = case.tokens()
    positions = torch.arange(case.length) + 3
    if case.config.documents:  # each sample begins its second document elsewhere
        starts = torch.arange(case.batch)[:, None] % case.length
        positions = torch.arange(case.length).expand(case.batch, -1)
        positions = torch.where(positions < starts, positions, positions - starts)
    arguments = dict(positions=positions, sample_ids=torch.arange(case.batch) * 5 + 1, step=7)
    logits, want_logits = (m(tokens, **arguments) for m in (model, oracle))
    loss, want = (m.loss(tokens, targets, count=11, **arguments) for m in (model, oracle))
    loss.backward()
    want.backward()
    # Compared when everything has been sent: a rank that stops at a difference leaves no other waiting.
    assert_equal_to(logits.detach(), want_logits.detach(), what="logits")
    assert_equal_to(loss.detach(), want.detach(), what="loss")
    assert_gradients_equal(model, oracle)


@pytest.mark.thorough
@examples(10)
@example(FOUR)
@example(DEEP)
@example(CUBE)
@given(grids())
def test_logits_loss_and_all_gradients_are_those_of_one_process(grid):
    minipar.run(compare, grid, world_size=grid.case.tp)


@pytest.mark.slow
@examples(100)
@given(grids([*GRIDS, ("2d", 9, 1), ("2.5d", 12, 3)]))
def test_on_more_drawn_grids_all_gradients_are_those_of_one_process(grid):
    minipar.run(compare, grid, world_size=grid.case.tp)


def compare_stages(world, grid: OnGrid) -> None:
    case = grid.case
    first, last = grid.cut(world, layers=[0], last=False), grid.cut(world, layers=[1], first=False)
    oracle, (tokens, targets) = case.model(), case.tokens()
    hidden = first(tokens, step=3)
    rows, columns = grid_shape(case.tp, grid.layout, grid.depth)
    assert hidden.shape == (case.batch // rows, case.length, case.config.dim // columns)
    loss, want = last.loss(hidden, targets, step=3), oracle.loss(tokens, targets, step=3)
    assert_equal_to(loss, want, what="loss")
    loss.backward()
    want.backward()
    placement, block = placement_of(last.head.weight), placement_of(first.embedding.weight)
    assert placement.tied_to == "embedding.weight"
    assert (placement.start, placement.length) == (
        block.start,
        block.length,
    )  # or their gradients could not be added
    total = first.embedding.weight.grad + last.head.weight.grad
    assert_equal_to(total, placement.slice_of(oracle.embedding.weight.grad), what="tied embedding")
    tied = {first.embedding.weight, last.head.weight}
    for stage in (first, last):
        assert_gradients_equal(stage, oracle, but=tied)
    with pytest.raises(ValueError, match=r"hidden is float64 .*; this stage takes floats \[B, T, dim=16\]"):
        last.loss(hidden.repeat(1, 1, 2), targets)


@pytest.mark.thorough
@on_each
def test_stages_pass_on_blocks_of_hidden_states(grid):
    config = replace(grid.case.config, tie_embeddings=True)
    grid = grid._replace(case=grid.case._replace(config=config))
    minipar.run(compare_stages, grid, world_size=grid.case.tp)


def held(world, grid: OnGrid):
    model, oracle = grid.cut(world), grid.case.model()
    state = full_state_dict(model, world)
    assert list(state) == list(oracle.state_dict())
    assert all(torch.equal(state[name], value) for name, value in oracle.state_dict().items())
    return [(placement_of(p), p.detach()) for p in model.parameters()]


@on_each
def test_no_rank_holds_a_whole_parameter_and_blocks_form_a_model(grid):
    of_ranks = minipar.run(held, grid, world_size=grid.case.tp)
    _, side = grid_shape(grid.case.tp, grid.layout, grid.depth)
    for parts in zip(*of_ranks):
        whole = gather(parts)
        share = 1 if whole.dim() == 1 else grid.case.tp // grid.depth // side
        assert [part.numel() for _, part in parts] == [whole.numel() // side // share] * grid.case.tp


def step_elems(world, grid: OnGrid) -> float:
    model = grid.cut(world.using("ring"))
    before = world.traffic.sent_bytes
    model.loss(*grid.case.tokens()).backward()
    return (world.traffic.sent_bytes - before) / FLOAT64


@examples(8)
@example(FOUR)
@example(DEEP)
@example(CUBE)
@given(grids())
def test_a_step_sends_what_the_formula_says(grid):
    case = grid.case
    rows, side = grid_shape(case.tp, grid.layout, grid.depth)
    case = case._replace(length=side * case.length)  # for rings to cut the numbers per token evenly
    config = replace(case.config, dim=case.config.dim * rows)
    grid = grid._replace(case=case._replace(config=config))
    got = minipar.run(step_elems, grid, world_size=case.tp)
    want = []
    for rank in range(case.tp):
        diagonal = rank // side % side == rank % side
        sizes = case.tp, case.batch * case.length, grid.depth
        want.append(grid_step_elems(config, grid.layout, *sizes, diagonal))
    assert sum(got) == sum(want)
    # The loss's sum over rows is one number, which a ring cannot cut.
    assert all(abs(a - b) < 2 for a, b in zip(got, want))


def test_a_layer_on_a_square_sends_less_the_more_ranks_there_are():
    config, tokens = ModelConfig(dim=4096, num_heads=32, num_layers=1, hidden_dim=11008, vocab_size=32), 65536
    weights = 4 * config.dim**2 + 3 * config.dim * config.hidden_dim
    sent = []
    for t, q in ((4, 2), (16, 4), (64, 8)):
        one, two = (grid_step_elems(replace(config, num_layers=n), "2d", t, tokens) for n in (1, 2))
        norms = 2 * (4 * tokens * (q - 1) / q**2 + 2 * config.dim * (q - 1) / q**2)
        layer = 3 * (q - 1) / t * (3 * tokens * config.dim + tokens * config.hidden_dim + weights)
        assert two - one == layer + norms
        sent.append(two - one)
    assert sent[0] > sent[1] > sent[2]


def saved_bytes(world, grid: OnGrid) -> int:
    """Bytes of the distinct storages that one layer's graph keeps, parameters apart."""
    model, case = grid.cut(world), grid.case
    rows, columns = grid_shape(case.tp, grid.layout, grid.depth)
    shape = (case.batch // rows, case.length, case.config.dim // columns)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    return bytes_kept(model, x, case)


@on_each
def test_a_layer_keeps_one_of_tp_parts_of_what_one_process_keeps(grid):
    """But for the norms' number per token, which the ranks with other features hold too, and RoPE's angles."""
    case = grid.case
    rows, columns = grid_shape(case.tp, grid.layout, grid.depth)
    scores = case.length if case.config.attention == "plain" else 0
    parts = layer_activation_bytes(
        ModelShape.of(case.config), case.length, case.batch, e=FLOAT64, scores=scores
    )
    positions, per_token = parts.pop("positions"), 2 * case.batch * case.length * FLOAT64
    want = (sum(parts.values()) + (columns - 1) * per_token) // case.tp + positions
    assert minipar.run(saved_bytes, grid, world_size=case.tp) == [want] * case.tp


class Largest(TorchDispatchMode):
    """The most bytes that a tensor has which is read or made meanwhile."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            self.num_bytes = max(self.num_bytes, x.nbytes if isinstance(x, torch.Tensor) else 0)
        return out


def largest(world, grid: OnGrid, whole: bool) -> int:
    model = grid.case.model() if whole else grid.cut(world)
    with Largest() as made:
        model.loss(*grid.case.tokens()).backward()
    return made.num_bytes


@pytest.mark.sampled(3)
@on_each
def test_no_rank_makes_a_whole_activation_or_a_whole_matrix(grid):
    """Sizes at which each of them is as large: [B, T, D] and [D, D], [B, T, F] and [D, F], logits and the embedding."""
    grid = on(grid.layout, grid.case.tp, grid.depth, batch=16, dim=64, num_heads=4, num_kv_heads=4, hidden_dim=64,
              vocab_size=64, dropout=0.0)  # fmt: skip
    grid = grid._replace(case=grid.case._replace(length=4))
    whole = 64 * 64 * FLOAT64
    assert minipar.run(largest, grid, True, world_size=1) == [whole]
    assert minipar.run(largest, grid, False, world_size=grid.case.tp) == [whole // 2] * grid.case.tp


# Bugs, planted one at a time ---------------------------------------------------------------------------------------


def norm_of_own_features(patch):
    def forward(self, x):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return autograd.copy(self.blocks.stack, self.weight) * x * scale

    patch.setattr(grid_model.GridRMSNorm, "forward", forward)


def norm_without_the_backward_sum(patch):
    def copy(comm, x, *args):
        return x if x.shape[-1:] == (1,) else plain(comm, x, *args)

    plain = autograd.copy
    patch.setattr(grid_model.autograd, "copy", copy)


def norm_gradient_of_own_samples(patch):
    def copy(comm, x, *args):
        return x if x.dim() == 1 else plain(comm, x, *args)

    plain = autograd.copy
    patch.setattr(grid_model.autograd, "copy", copy)


def dropout_of_the_first_features(patch):
    plain = grid_model.GridDropout.__init__

    def first(self, block, blocks):
        plain(self, block, blocks)
        self.dropout = lambda *args: block.dropout(*args[:-1])

    patch.setattr(grid_model.GridDropout, "__init__", first)


def rows_for_columns(patch):
    init = grid_layout.GridLayout.__init__
    cube = grid_layout.CubeLayout.__init__

    def swapped(self, comm, depth=1):
        init(self, comm, depth)
        grid = self.grid
        same_i = [n * grid.q**2 + grid.i * grid.q + j for n in range(grid.d) for j in range(grid.q)]
        self.outer = self.inner = grid_layout.Blocks(grid.column, comm.subgroup(same_i, "same i"))

    def swapped_cube(self, comm):
        cube(self, comm)
        self.outer, self.inner = self.inner, self.outer

    patch.setattr(grid_layout.GridLayout, "__init__", swapped)
    patch.setattr(grid_layout.CubeLayout, "__init__", swapped_cube)


def embedding_block_not_turned(patch):
    patch.setattr(grid_layout._Swap, "apply", lambda x, comm, partner: x.view_as(x))
    patch.setattr(
        grid_layout.CubeLayout, "gather_table", lambda self, w: autograd.all_gather(self.outer.stack, w)
    )


def loss_of_own_samples(patch):
    plain = autograd.all_reduce
    patch.setattr(grid_model.autograd, "all_reduce", lambda comm, x: x if x.dim() == 0 else plain(comm, x))


FAULTS = [
    norm_of_own_features,
    norm_without_the_backward_sum,
    norm_gradient_of_own_samples,
    dropout_of_the_first_features,
    rows_for_columns,
    embedding_block_not_turned,
    loss_of_own_samples,
]


def seen(world, grid: OnGrid, faults) -> list[str]:
    """What the comparison says with each fault in."""
    said = []
    for fault in faults:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            try:
                compare(world, grid)
                said.append("nothing")
            except AssertionError as error:
                said.append(str(error))
    return said


@pytest.mark.thorough
@on_each
def test_planted_bugs_are_seen(grid):
    said = minipar.run(seen, grid, FAULTS, world_size=grid.case.tp)
    for fault, of_ranks in zip(FAULTS, zip(*said)):
        assert any("max|a - b|" in line for line in of_ranks), (fault.__name__, of_ranks)


# What cannot be cut ------------------------------------------------------------------------------------------------

SIZES = dict(vocab_size=24, dim=48, num_heads=12, num_kv_heads=6, hidden_dim=24)


@pytest.mark.parametrize(
    ("change", "grid", "line"),
    [
        ({}, (6, "2d"), "tp=6 with tp_layout=2d is not a square; use tp=1, 4, 9 or 16, or tp_layout=1d"),
        ({}, (8, "2.5d", 4), "tp=8 with tp_layout=2.5d is not tp_layout.depth=4 times a square; use tp=4, 16, 36 or 64, or "
                             "tp_layout=1d"),
        ({}, (4, "3d"), "tp=4 with tp_layout=3d is not a cube; use tp=1, 8, 27 or 64, or tp_layout=1d"),
        (dict(num_kv_heads=3), (4, "2d"), "tp=4 with tp_layout=2d cuts num_kv_heads=3 into 2 equal parts; use a "
                                          "multiple of 2, or tp_layout=1d"),
        (dict(vocab_size=26), (8, "3d"), "tp=8 with tp_layout=3d cuts vocab_size=26 into 4 equal parts; use a "
                                         "multiple of 4, or tp_layout=1d"),
        (dict(num_kv_heads=12, kv_latent_dim=8), (4, "2d"), "tp_layout=2d has no cut for kv_latent_dim=8; use "
                                                            "tp_layout=1d"),
        (dict(qkv_bias=True), (4, "2d"), "tp_layout=2d has no cut for qkv_bias=True; use tp_layout=1d"),
        (dict(qk_norm=True), (8, "3d"), "tp_layout=3d has no cut for qk_norm=True; use tp_layout=1d"),
        (dict(num_experts=2), (4, "2d"), "tp_layout=2d has no cut for num_experts=2; use tp_layout=1d"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_in_a_line_that_says_what_can(change, grid, line):
    with pytest.raises(ValueError) as error:
        check_grid(ModelConfig(**SIZES | change), *grid)
    assert str(error.value) == line


def test_a_norm_squares_no_number_in_half_precision():
    """The square of 300 is no float16."""
    x = torch.full((4, 4, 16), 300.0, dtype=torch.float16)
    (y,) = minipar.run(lambda world: on("3d", 1).cut(world).norm(x).detach(), world_size=1)
    assert torch.allclose(y.double(), torch.ones(4, 4, 16, dtype=torch.float64), rtol=1e-3)


def odd_batch(world) -> str:
    model = FOUR.cut(world)
    with pytest.raises(ValueError) as error:
        model.loss(*torch.zeros(2, 3, 4, dtype=torch.int64))
    return str(error.value)


def test_samples_that_the_rows_cannot_share_evenly_are_refused():
    assert (
        minipar.run(odd_batch, world_size=4)
        == ["the rows of ranks=2 does not divide samples=3; use 1 or 3"] * 4
    )
