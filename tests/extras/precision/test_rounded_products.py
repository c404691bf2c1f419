"""Rounded products are one process's on every mesh; the fault of a rank that knows only its own amax is noticed."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import minipar
from minipar.config import VERIFY_DEFAULTS
from minipar.config.model_config import ModelConfig
from minipar.extras.precision import rounded_products
from minipar.extras.precision.block_scales import round_fp8, round_mx, round_nvfp4
from minipar.extras.precision.rounded_products import RoundedProducts, amax_over, install, rounding_of
from minipar.mesh import Mesh
from minipar.model import Linear, Transformer, linear
from minipar.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from minipar.train.verification.verify import table, verify

MODEL = ModelConfig(dim=128, num_layers=2, num_heads=4, hidden_dim=128, max_seq_len=64, dropout=0.1)
RUN = VERIFY_DEFAULTS.choosing(model=MODEL, steps=2, batch_size=4)
FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


# One layer ------------------------------------------------------------------------------------------------------------


def test_each_product_rounds_its_operands_along_the_dim_that_it_sums():
    x, w, dy = drawn(2, 40, 33), drawn(48, 33), drawn(1, 2, 40, 48)[0]
    layer = Linear(33, 48, dtype=torch.float64)
    layer.weight.data.copy_(w)
    layer.products = RoundedProducts(
        lambda t, is_gradient, _: round_mx(t, "e5m2" if is_gradient else "e4m3"), (), (), ()
    )
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)

    def along(t, dim, elements="e4m3"):
        return round_mx(t.detach().movedim(dim, -1), elements).movedim(-1, dim)

    assert torch.equal(y, along(x, -1) @ along(w, 1).t())
    assert torch.equal(x.grad.flatten(0, 1), along(dy, -1, "e5m2").flatten(0, 1) @ along(w, 0))
    dw = along(dy, -2, "e5m2").flatten(0, 1).t() @ along(x, -2).flatten(0, 1)
    assert torch.equal(layer.weight.grad, dw)


def test_bf16_products_are_summed_in_float32_and_save_no_more():
    x, w = drawn(2, 8, 32).bfloat16().requires_grad_(), drawn(16, 32).bfloat16().requires_grad_()
    saved = []

    def result(**options):
        saved.append(0)

        def pack(t):
            saved[-1] += t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return linear(x, w, **options)

    result()
    y = result(products=RoundedProducts(rounding_of(RUN.choosing(products="nvfp4")), (), (), ()))
    assert y.dtype == torch.bfloat16
    exact = round_nvfp4(x.detach()).float() @ round_nvfp4(w.detach()).float().t()
    assert torch.equal(y, exact.bfloat16())
    assert saved[0] == saved[1] == x.nbytes + w.nbytes


def layer_on_ranks(world, name: str, kind: str, alone: bool) -> float:
    """The largest relative difference of y, dx and dw of a layer over tp ranks to one process's, or to 0 where alike.

    alone  the planted fault: a rank takes the largest number of its own part
    """
    x, w, dy = drawn(2, 32, 128), drawn(64 * world.size, 128) * 0.1, drawn(1, 2, 32, 64 * world.size)[0]
    x[..., 0], w[0], dy[..., 0] = (
        9 * x[..., 0],
        9 * w[0],
        9 * dy[..., 0],
    )  # so that a rank has less than another
    config = RUN.choosing(products=name)
    round_operand, comms = rounding_of(config), () if alone else (world,)
    whole = layer_of(w)
    whole.products = RoundedProducts(round_operand, (), (), ())
    xs = [x.clone().requires_grad_() for _ in range(2)]
    y = whole(xs[0])
    y.backward(dy)
    if kind == "column":
        cut = ColumnParallelLinear.from_linear(layer_of(w), world)
        cut.products = RoundedProducts(round_operand, (), comms, comms)
        mine, own_dy = slice(64 * world.rank, 64 * (world.rank + 1)), dy.chunk(world.size, -1)[world.rank]
        wanted = [y.chunk(world.size, -1)[world.rank], xs[0].grad, whole.weight.grad[mine]]
    else:
        cut = RowParallelLinear.from_linear(layer_of(w), world, input_is_parallel=False)
        cut.products = RoundedProducts(round_operand, comms, comms, ())
        own_dy = dy
        wanted = [y, xs[0].grad, whole.weight.grad.chunk(world.size, 1)[world.rank]]
    own = cut(xs[1])
    own.backward(own_dy)
    found = [own, xs[1].grad, cut.weight.grad]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted))


def layer_of(w: torch.Tensor) -> Linear:
    layer = Linear(*reversed(w.shape), dtype=torch.float64)
    layer.weight.data.copy_(w)
    return layer


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_cut_over_tp_rounds_as_the_whole_one(name, kind):
    assert max(minipar.run(layer_on_ranks, name, kind, False, world_size=2)) < 1e-12
    if name in ("fp8", "nvfp4"):
        assert max(minipar.run(layer_on_ranks, name, kind, True, world_size=2)) > 1e-4


def bytes_of_a_layer(world, name: str) -> int:
    """What a layer on one rank's samples sends forward and backward, by rings."""
    ring = world.using("ring")
    x = drawn(2, 32, 64).requires_grad_()
    products = RoundedProducts(rounding_of(RUN.choosing(products=name)), (ring,), (), (ring,))
    world.traffic.reset()
    linear(x, drawn(32, 64).requires_grad_(), products=products).sum().backward()
    return world.traffic.sent_bytes


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_scale_of_a_tensor_costs_a_float32_around_the_ring(size):
    """x in the forward; dy for dx; dy and x for dw."""
    for name in FORMATS:
        operands = 4 if name in ("fp8", "nvfp4") else 0
        assert sum(minipar.run(bytes_of_a_layer, name, world_size=size)) == operands * 2 * (size - 1) * 4


def scale_of_parts(world) -> bool:
    """A tensor cut over every rank is rounded as the whole one, by each format with a scale of the tensor."""
    whole = drawn(world.size * 16, 48) * torch.arange(1, 49)
    mine = slice(world.rank * 16, (world.rank + 1) * 16)
    amax = partial(amax_over, (world,))
    alike = [
        torch.equal(round_one(whole[mine], whole_amax=amax), round_one(whole)[mine])
        for round_one in (round_nvfp4, partial(round_fp8, elements="e4m3"))
    ]
    return all(alike)


def test_parts_of_a_tensor_have_the_scale_of_the_whole():
    assert all(minipar.run(scale_of_parts, world_size=3))


# Whole runs -----------------------------------------------------------------------------------------------------------

MESHES = [
    dict(products="nvfp4", tp=2, dp=2, zero=3, recompute="full"),
    dict(products="mxfp4", tp=2, pp=2, microbatches=2, schedule="zb-h1"),
    dict(products="fp8", cp=2, tp=2, sequence_parallel=True, zero=1),
    dict(products=("mxfp8", {"scale": "ceil", "gradients": "e5m2"}), cp=2, cp_layout="contiguous", zero=2),
    dict(products="nvfp4", pp=2, dp=2),
    dict(products="nvfp4", cp=2, cp_attention="ulysses", dp=2, algorithm="ring"),
    dict(products="mxfp8", dp=2, dtype="bfloat16"),
    dict(products="nvfp4", dp=2, tp=2, dtype="float32"),
    dict(products="mxfp4", dp=2, compress="int8"),
    dict(products="mxfp4", tp=2, model=replace(MODEL, parallel_block=True)),
    dict(products="mxfp4", dp=2, model=replace(MODEL, kv_latent_dim=32)),
    dict(products="mxfp4", tp=2, model=replace(MODEL, qkv_bias=True, qk_norm=True)),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_gives_the_numbers_of_one_process(mesh):
    result = verify(RUN.choosing(**mesh))
    assert result.equal, table(result)


def test_rounding_changes_the_numbers_of_a_run():
    """So that the meshes above do not agree because nothing is rounded."""
    tokens = torch.arange(64).reshape(1, 64)
    losses = set()
    for name in ("plain", *FORMATS):
        model = Transformer(MODEL, seed=0, dtype=torch.float64)
        if name != "plain":
            install(model, RUN.choosing(products=name), None)
            assert (
                sum(isinstance(m.products, RoundedProducts) for m in model.modules() if isinstance(m, Linear))
                == 14
            )
        losses.add(model.loss(tokens, tokens.roll(-1)).item())
    assert len(losses) == 5
    assert max(losses) - min(losses) < 0.1


@pytest.mark.thorough
def test_a_run_whose_ranks_know_only_their_own_amax_diverges():

    def losses(world):
        config = RUN.choosing(products="nvfp4", tp=2, dp=2)
        state = parallelize(config, Mesh(world, dp=2, tp=2), world.device)
        return [train_step(world, state, config, load_text(None), step)["loss"] for step in range(2)]

    def faulty(world):
        kept = rounded_products._comms
        rounded_products._comms = lambda mesh: ((), ())
        try:
            return losses(world)
        finally:
            rounded_products._comms = kept

    right, wrong = (minipar.run(run, world_size=4)[0] for run in (losses, faulty))
    assert abs(right[0] - wrong[0]) > 1e-6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(products="mxfp5"), "products='mxfp5' is unknown; use .*; did you mean mxfp"),
        (dict(products=("mxfp4", {"scale": "up"})), "products.scale='up' is unknown; use floor or ceil"),
        (
            dict(products=("mxfp8", {"gradients": "e2m1"})),
            "products.gradients='e2m1' is unknown; use e4m3 or e5m2",
        ),
        (dict(products=("nvfp4", {"scale": "floor"})), "products.scale: products=nvfp4 has no options"),
        (dict(products="mxfp4", moe=4), "products=mxfp4: num_experts=4: experts multiply in one grouped"),
        (
            dict(products="mxfp4", tp=2, sequence_parallel=True, tp_chunked=True),
            "tp_chunked multiplies a part",
        ),
        (dict(products="mxfp4", tp=4, tp_layout="2d"), "tp_layout=2d multiplies blocks"),
        (dict(products="mxfp4", compile="eager"), "compile=eager would take rounding"),
        (
            dict(products="nvfp4", microbatches=2),
            "which a part of the batch does not know, and microbatches=2",
        ),
        (dict(products="fp8", schedule=("seq1f1b", {"slices": 2})), "and schedule=seq1f1b"),
        (
            dict(products="nvfp4", dp=2, compress=("diloco", {"every": 2})),
            "those of compress=diloco differ",
        ),
        (
            dict(products="mxfp4", tp=2, model=ModelConfig(dim=96, num_heads=4, max_seq_len=64)),
            "cut some of dim=96",
        ),
        (dict(products="mxfp4", cp=4), "cuts seq_len=64 inside such a block"),
        (dict(products="mxfp4", cp=2, cp_layout="striped"), "cp=2 with cp_layout=striped cuts seq_len=64"),
        (dict(products="mxfp4", schedule=("seq1f1b", {"slices": 3})), "schedule=seq1f1b cuts seq_len=64"),
        (
            dict(
                products="fp8", tp=4, model=ModelConfig(dim=128, num_heads=4, num_kv_heads=2, max_seq_len=64)
            ),
            "tp=4 ranks share num_kv_heads=2.*use tp=1 or 2",
        ),
    ],
)
def test_what_would_cut_a_block_or_hide_a_number_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        RUN.choosing(**options)
