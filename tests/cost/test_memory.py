"""Memory is what papers print, what the library's own formulas say, and what ranks were counted to hold."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import minipar
from minipar.config.model_config import ModelConfig
from minipar.cost.activations import bytes_of_units, gpt_layer_bytes, layer_bytes
from minipar.cost.layout import Implementation, Job, Layout, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import (
    ITEMS,
    model_state_bytes,
    rank_memory,
    worst_rank_memory,
)
from minipar.cost.model_table import MODELS, gpt
from minipar.cost.models import ModelShape
from minipar.cost.planner import plan
from minipar.cost.ranks import ends_elems, held_by, held_elems, layer_kinds_elems, unsharded_elems
from minipar.data_parallel.fsdp_unit import UnitReducer
from minipar.mesh import Mesh
from minipar.model import Transformer
from minipar.model.block import run_blocks
from minipar.support.live_bytes import LiveBytes
from minipar.tensor_parallel import tensor_parallel
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.recompute import recompute
from minipar.train.step import train_step
from tests.cost.published import ZERO_TABLE1
from tests.cost.runs import LATENT, MIXTURE, PARALLEL, RUN, SMALL, job_of


@pytest.mark.parametrize("num_params", ZERO_TABLE1)
def test_zeros_table_1_cell_by_cell(num_params):
    """The paper cuts the cells of its larger models to whole GB, and rounds the others."""
    for ranks, cells in ZERO_TABLE1[num_params].items():
        for stage, printed in enumerate(cells, start=1):
            gb = model_state_bytes(num_params, ranks, stage) / 1e9
            assert gb == pytest.approx(printed, abs=0.05) if num_params < 1e10 else 0 <= gb - printed < 1


def test_one_rank_holds_all_unless_told_otherwise():
    assert (
        model_state_bytes(10) == model_state_bytes(10, 1, 0, "mixed") == model_state_bytes(10, zero=3) == 160
    )


def test_a_forgotten_factor_is_noticed():
    """Planted faults: gradients not cut, the master weights left out, bits for bytes. Each misses the table."""
    right = model_state_bytes(7.5e9, 64, 2)
    for wrong in (2 * 7.5e9 * 2 + 12 * 7.5e9 / 64, 2 * 7.5e9 + 10 * 7.5e9 / 64, 8 * right):
        assert abs(wrong - right) / 1e9 > 0.4


def korthikanti(s, b, h, a, t):
    """The rows of table 2."""
    return {
        (False, "none"): s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        (True, "none"): s * b * h / t * (34 + 5 * a * s / h),
        (False, "selective"): s * b * h * (10 + 24 / t),
        (True, "selective"): 34 * s * b * h / t,
        (False, "full"): 2 * s * b * h,
        (True, "full"): 2 * s * b * h / t,
    }


@pytest.mark.parametrize("t", [1, 2, 8])
def test_korthikantis_formulas(t):
    for (split, how), want in korthikanti(2048, 4, 6144, 64, t).items():
        if t == 1 and split:
            continue
        assert gpt_layer_bytes(2048, 4, 6144, 64, t, split, how) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("h", "a", "saved"), [(12288, 96, 0.70), (20480, 128, 0.65)])
def test_selective_recomputation_saves_what_the_paper_says(h, a, saved):
    whole, selective = (gpt_layer_bytes(2048, 1, h, a, recompute=how) for how in ("none", "selective"))
    assert 1 - selective / whole == pytest.approx(saved, abs=0.005)


def counted_bytes(
    config: ModelConfig, recomputed: str, dtype: torch.dtype = torch.float32
) -> tuple[int, int]:
    """(kept by the forward of all blocks, alive at most during their backward), without gradients of weights."""
    model = Transformer(config, dtype=dtype)
    recompute(model, recomputed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(4, 128, 64, dtype=dtype, requires_grad=True)
    positions, samples = torch.arange(128), torch.arange(4)
    run = model.overrides.run_blocks or run_blocks
    with LiveBytes() as memory:
        y = run(list(model.layers.values()), x, positions, samples, 0)
        # The first layer's input, but not the last one's output. A norm in 16 bits keeps a float32 copy of its input.
        keeps_input = dtype.itemsize >= 4 or recomputed == "full"
        kept = memory.now - y.nbytes + keeps_input * x.nbytes
        memory.peak = memory.now
        y.backward(y.detach())
    return kept, memory.peak


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(num_kv_heads=2, dropout=0.1),
        dict(dropout=0.1, parallel_block=True),
        dict(kv_latent_dim=24, rope_dim=8),
        dict(qkv_bias=True, num_kv_heads=2),
        dict(qk_norm=True, head_dim=24, num_kv_heads=2),
    ],
    ids=str,
)
def test_layers_keep_as_many_bytes_as_are_counted_alive(recomputed, options, dtype):
    config = ModelConfig(dim=64, num_layers=4, num_heads=4, max_seq_len=128, **options)
    kept, _ = counted_bytes(config, recomputed, dtype)
    sizes = 128, 4, 1, False, recomputed, 128, False, dtype.itemsize
    assert kept == 4 * layer_bytes(ModelShape.of(config), *sizes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "latent", [{}, dict(kv_latent_dim=24, rope_dim=8), dict(qk_norm=True)], ids=["heads", "latents", "norms"]
)
@pytest.mark.parametrize("attention", ["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_recomputed_core_keeps_neither_scores_nor_log_sum_exps(attention, latent, dtype):
    """Of attention that stores no scores it saves four bytes a token and head, and repeats all of its work."""
    config = ModelConfig(dim=64, num_layers=4, num_heads=4, max_seq_len=128, attention=attention, **latent)
    shape, dense = ModelShape.of(config), attention == "plain"
    e = dtype.itemsize
    selective, whole = (
        layer_bytes(shape, 128, 4, 1, False, how, 128, dense, e) for how in ("selective", "none")
    )
    assert counted_bytes(config, "selective", dtype)[0] == 4 * selective
    assert counted_bytes(config, "none", dtype)[0] == 4 * whole
    of_latents = (
        16 + 8 if shape.kv_latent_dim else 0
    )  # the core's output, of which o's input is a narrower copy
    assert dense or whole - selective == 4 * 128 * 4 * (4 + e * of_latents)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, dict(num_kv_heads=2, dropout=0.1)], ids=str)
def test_units_keep_one_input_each_and_are_recomputed_whole(options):
    """What a unit's backward holds besides, gradients of hidden states, is the same for every size of a unit."""
    config = ModelConfig(dim=64, num_layers=6, num_heads=4, max_seq_len=128, **options)
    layer, own = (
        layer_bytes(ModelShape.of(config), 128, 4, 1, False, how, 128, False, 4) for how in ("none", "full")
    )
    besides = []
    for every in (1, 2, 3, 4, 6, 9):
        kept, most = counted_bytes(config, f"every:{every}")
        want_kept, want_most = bytes_of_units(6, every, layer, own)
        assert kept == want_kept, every
        besides.append(most - want_most)
    assert 0 < besides[0] < layer
    if not config.dropout:  # a mask of random numbers is larger than what is kept of it
        assert set(besides[:-1]) == {besides[0]}


# Pipelines ------------------------------------------------------------------------------------------------------------

MEGATRON = Implementation(attention="dense", sequence_parallel=True)


def gpt_job(**changes) -> Job:
    job = dict(shape=gpt("x", 48, 6144, 48), machine=MACHINES["a100-80gb"], gpus=64, seq_len=2048, batch=64)
    return Job(**job | dict(implementation=MEGATRON) | changes)


def evenly(job: Job) -> Job:
    """With a head so small that every stage has as many layers."""
    return replace(job, shape=replace(job.shape, vocab_size=8))


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_stage_0_of_1f1b_keeps_all_layers_activations_at_any_pp(pp):
    job = evenly(gpt_job())
    kept = rank_memory(job, Layout(dp=64 // pp // 8, pp=pp, tp=8), 0)["activations"]
    assert kept == pytest.approx(48 * gpt_layer_bytes(2048, 1, 6144, 48, 8, True), rel=1e-12)
    looped = rank_memory(job, Layout(dp=64 // pp // 8, pp=pp, tp=8, schedule="interleaved", chunks=2), 0)
    assert looped["activations"] == pytest.approx(kept * (1 + (pp - 1) / (2 * pp)), rel=1e-12)


def test_few_microbatches_keep_less_and_gpipe_keeps_them_all():
    job = evenly(gpt_job(batch=4))
    layer = gpt_layer_bytes(2048, 1, 6144, 48, 8, True)
    for schedule, dp, live in (("1f1b", 1, 4), ("1f1b", 2, 2), ("gpipe", 1, 4)):
        kept = rank_memory(job, Layout(dp=dp, pp=4, tp=8, schedule=schedule), 0)["activations"]
        assert kept == pytest.approx(live * 12 * layer)


def test_the_worst_rank_is_the_worst_of_all():
    job = gpt_job()
    for text in (
        "dp2-pp4-tp8",
        "dp1-pp8-tp8-zb-v",
        "dp4-pp16-gpipe-full",
        "dp8-pp8-zero1-interleaved:2",
        "dp2-pp32-zb-h2",
    ):
        layout = parse_layout(text)
        every = [sum(rank_memory(job, layout, rank).values()) for rank in range(layout.pp)]
        rank, items = worst_rank_memory(job, layout)
        assert sum(items.values()) == max(every) == every[rank]
        assert tuple(items) == ITEMS
        assert min(items.values()) >= 0


def loss_bytes(world, dtype, split, live, vocab_size=1024):
    """Most bytes per token of a last stage without layers, from the forwards of `live` microbatches to their backwards."""

    def peak(samples):
        config = ModelConfig(vocab_size=vocab_size, dim=32, num_heads=4, max_seq_len=64)
        stage = Transformer(config, 0, [], False, True, None, dtype)
        if world.size > 1:
            tensor_parallel(stage, world, sequence_parallel=split)
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = torch.randn(samples, 64 // (world.size if split else 1), 32, dtype=dtype, requires_grad=True)
        targets = torch.zeros(samples, 64, dtype=torch.int64)
        with LiveBytes() as memory:
            losses = [stage(x.clone(), targets=targets) for _ in range(live)]
            for loss in losses:
                loss.backward()
        return memory.peak

    return (peak(8) - peak(4)) / (4 * 64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("tp", "split"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("precision", ["mixed", "float32", "float64"])
def test_logits_take_the_bytes_that_are_counted_alive(precision, tp, split):
    """But for the few numbers per token of the loss, and the float32 block of it that tp's loss has at a time."""
    how = Implementation(sequence_parallel=split)
    job = Job(ModelShape("x", 2, 32, 4, 128, 1024), MACHINES["h100"], 2 * tp, 64, 4, precision, how)
    for schedule, live in (("1f1b", 1), ("gpipe", 2)):
        layout = Layout(pp=2, tp=tp, schedule=schedule, microbatch=4 // live)
        predicted = rank_memory(job, layout, 1)["logits"]
        dtype = torch.bfloat16 if precision == "mixed" else getattr(torch, precision)
        (counted, *_) = minipar.run(loss_bytes, dtype, split, live, world_size=tp)
        wide = max(4, job.bytes_of.activation)
        block = 1024 / tp * wide * (tp > 1)
        assert 0 <= counted - block - predicted / (256 / live) <= 11 * wide * live


def test_fsdp_gathers_the_ends_the_layer_that_runs_and_the_next_one():
    job = Job(MODELS["llama-7b"], MACHINES["h100"], 8, 4096, 8)
    gathered = rank_memory(job, Layout(dp=8, zero=3), 0)["gathered units"]
    layer = (6738415616 - 2 * 32000 * 4096 - 4096) / 32
    assert gathered == 2 * (2 * layer + 2 * 32000 * 4096 + 4096)
    assert rank_memory(job, Layout(dp=8, zero=2), 0)["gathered units"] == 0


def test_gradients_accumulate_whole():
    """ZeRO-2 and -3 cut gradients only where one microbatch is all there is, as in `minipar train`."""
    job = Job(MODELS["llama-7b"], MACHINES["h100"], 8, 512, 64)
    for zero in (2, 3):
        whole, cut = (rank_memory(job, Layout(dp=8, zero=zero, microbatch=b), 0)["gradients"] for b in (4, 8))
        assert whole == 2 * 6738415616
        assert cut == whole / 8


def test_gradient_buffers_are_two_buckets_capped_by_gradients():
    def buffers(**changes) -> float:
        return rank_memory(*job_of(replace(RUN, **changes)), 0)["buffers"]

    assert buffers(dp=2, bucket_mb=0.25) == 2 * 2**18
    gradients = rank_memory(*job_of(replace(RUN, dp=2)), 0)["gradients"]
    assert buffers(dp=2, bucket_mb=25) == gradients < 50 * 2**20
    assert buffers(tp=2, bucket_mb=25) == 0


def test_zero_3_reduces_a_layer_at_a_time_whatever_the_bucket():
    found = [
        rank_memory(*job_of(replace(RUN, dp=2, zero=3, bucket_mb=mb)), 0)["buffers"] for mb in (0.01, 1, 100)
    ]
    job, _ = job_of(replace(RUN, dp=2, zero=3))
    assert found == [2 * 8 * layer_kinds_elems(job, 1, 1)[0][0]] * 3


# Real ranks -----------------------------------------------------------------------------------------------------------

TIED = replace(SMALL, tie_embeddings=True)


def held(world, config):
    """Bytes of parameters, gradients and optimizer state on this rank, after a step."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    train_step(world, state, config, load_text(None), 0)
    parameters = {id(p): p.nbytes for stage in state.stages for p in stage.parameters()}
    shards = [x for x, _ in state.optimizer.tensors_and_states()]
    moments = [
        v.nbytes
        for _, slots in state.optimizer.tensors_and_states()
        for k, v in slots.items()
        if k.startswith("exp_")
    ]
    return sum(parameters.values()), sum(x.nbytes for x in shards), sum(moments)


MESHES = [
    dict(tp=4),
    dict(dp=2, tp=2),
    dict(pp=2, dp=2, microbatches=2),
    dict(pp=2, tp=2, microbatches=2, sequence_parallel=True),
    dict(pp=2, microbatches=4, schedule="zb-v"),
    dict(dp=2, tp=2, model=PARALLEL),
    dict(dp=2, tp=2, model=LATENT),
    dict(dp=2, ep=2, model=MIXTURE),
    dict(dp=2, pp=2, ep=2, model=MIXTURE, microbatches=2),
    dict(dp=2, pp=2, model=TIED, microbatches=2),
    dict(pp=2, model=TIED, microbatches=4, schedule="zb-v"),
    dict(dp=2, zero=1),
    dict(dp=4, zero=2),
    dict(dp=2, cp=2, zero=3),
    dict(pp=2, dp=2, zero=1, microbatches=2),
    dict(pp=2, dp=2, zero=3, microbatches=2, model=TIED),
    dict(pp=2, dp=2, zero=3, microbatches=4, schedule="zb-v", model=TIED),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "mesh", MESHES, ids=lambda mesh: str({k: v for k, v in mesh.items() if k != "model"})
)
def test_ranks_hold_the_parameters_and_states_that_were_predicted(mesh):
    """Exactly; with ZeRO the ranks that share a shard together, each but for the padding of its buckets."""
    config = replace(RUN, **mesh)
    job, layout = job_of(config)
    found = minipar.run(held, config, world_size=config.world_size)
    grid = Mesh(config.world_size, **config.mesh_sizes)
    for rank, (parameters, shards, moments) in enumerate(found):
        at = grid.coordinates_of(rank)
        items = rank_memory(job, layout, at.pp)
        elems = sum(held_elems(job, layout, held_by(job, layout, at.pp)))
        unsharded = unsharded_elems(job, layout, held_by(job, layout, at.pp))
        if not config.zero:
            assert (parameters, shards, moments) == (8 * elems, 8 * elems, 16 * elems)
            assert parameters == items["parameters"]
            assert moments == items["optimizer state"]
            assert shards == items["gradients"]
            continue
        group = [found[other] for other in grid.group(rank, "dp", "cp")]
        on_all = elems + (len(group) - 1) * unsharded
        assert sum(moments for *_, moments in group) == 16 * on_all
        assert moments == pytest.approx(items["optimizer state"], rel=0.02)
        if config.zero == 3:
            assert sum(parameters for parameters, *_ in group) == 8 * on_all
        else:
            assert parameters == items["parameters"] == 8 * elems


def unreduced(world, config):
    """(pp coordinate, most bytes of gradients that FSDP holds unsharded at a time)."""
    found = []
    collect = UnitReducer.collect_grad

    def counted(reducer, param, gradient):
        collect(reducer, param, gradient)
        found.append(sum(x.nbytes for gradients in reducer.gradients for x in gradients.pending.values()))

    mesh = Mesh(world, **config.mesh_sizes)
    state = parallelize(config, mesh, world.device)
    with patch.object(UnitReducer, "collect_grad", counted):
        train_step(world, state, config, load_text(None), 0)
    return mesh.coordinates.pp, max(found)


@pytest.mark.parametrize(
    "mesh",
    [dict(dp=2, microbatches=1), dict(dp=2, microbatches=2), dict(dp=2, pp=2, microbatches=1),
     dict(dp=2, pp=2, microbatches=2, model=TIED)],
    ids=lambda mesh: str({k: v for k, v in mesh.items() if k != "model"}),
)  # fmt: skip
def test_gradients_are_whole_where_zero_3_reduces_once_a_step(mesh):
    """Over several microbatches, to the byte. With one microbatch only a layer's and the root's gradients are whole."""
    config = replace(RUN, **mesh, zero=3)
    job, layout = job_of(config)
    for pp, whole in minipar.run(unreduced, config, world_size=config.world_size):
        held = held_by(job, layout, pp)
        elems, items = sum(held_elems(job, layout, held)), rank_memory(job, layout, pp)
        if config.microbatches > 1:
            assert whole == items["gradients"] == 8 * elems
        else:
            layer = sum(layer_kinds_elems(job, 1, 1)[0])
            assert whole <= 8 * (layer + ends_elems(job, layout, held))
            assert items["gradients"] == 4 * elems


def test_gradients_reduced_after_every_microbatch_are_sharded():
    """By programs such as torchtitan; ours has it for ZeRO-2 alone."""
    how = Implementation(reduce_every="microbatch")
    job = Job(MODELS["llama-7b"], MACHINES["h100"], 8, 512, 64, implementation=how)
    for zero in (2, 3):
        layout = Layout(dp=8, zero=zero, microbatch=2)
        assert rank_memory(job, layout, 0)["gradients"] == 2 * 6738415616 / 8
    found = plan(job)
    assert all(found.families["zero", zero] is not None for zero in (2, 3))
