"""The host waits for a GPU once in a training step, and where messages or rows have sizes that a router chose."""

from dataclasses import replace

import pytest
import torch

import minipar
from minipar.comm.transport.stream import Handle
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.train.data.text import load_data
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from tests.train.host_waits import host_waits

STEP = {
    "train/step.py train_step": "whether to update depends on the loss and the gradient norm: one read for both"
}
ROUTED = {
    "train/metrics.py routing": "the step's metrics, after its work is enqueued",
    "model/permute.py plan_kept_rows": "as many rows are computed as choices were kept",
    "model/grouped_mlp.py grouped_swiglu": "a dense product per expert needs its number of rows",
}
BY_KERNEL = {name: why for name, why in ROUTED.items() if "grouped_mlp" not in name}
SENT = {
    "train/metrics.py routing": ROUTED["train/metrics.py routing"],
    "expert/dispatch.py AllToAll.row_counts": "a message to a rank is as long as its experts' rows",
}
SHADOWED = {
    "train/metrics.py routing": ROUTED["train/metrics.py routing"],
    "model/permute.py plan_kept_rows": ROUTED["model/permute.py plan_kept_rows"],
    "expert/dispatch.py AllToAll.row_counts": SENT["expert/dispatch.py AllToAll.row_counts"],
}
DOCUMENTS = {
    "model/mask.py Mask.bounds": "where documents begin: the loop over tiles is on the CPU, and leaves out those unseen",
    "model/mask.py Mask.tiles": "of what bounds has read, on the CPU",
}
STEPS = {
    "extras/compress/momentum_optimizer.py MomentumOptimizer.num_steps": "the count of steps, on the CPU",
}
COUNTED = {
    "extras/optimizers/tensor_lists.py update_moments": "the count of steps, which is on the CPU, as torch's optimizers' is"
}

ON_CPU = {"model/fused.py _kernel": "whether a score is nan, which the kernel for the CPU does not pass on"}

MODEL = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32, dropout=0.1)
EXPERTS = replace(MODEL, num_experts=4, top_k=2, group_tokens=8, moe_every=1)
BASE = TrainConfig(model=MODEL, batch_size=8, seq_len=32, steps=3, warmup=1)
KEPT = dict(recompute="full", offload_activations=True)

CASES = {
    "ddp, tp": (STEP, dict(dp=2, tp=2, sequence_parallel=True, tp_chunked=True, **KEPT)),
    "zero 1, tp": (STEP, dict(dp=2, tp=2, zero=1, dtype="float16", partition_activations=True, **KEPT)),
    "zero 2, pp": (STEP, dict(dp=2, pp=2, zero=2, microbatches=2, reduce_every="microbatch")),
    "zero 3, cp": (STEP, dict(dp=2, cp=2, zero=3, replicate=2, cp_attention="ulysses")),
    "pp, cp": (STEP, dict(pp=2, cp=2, microbatches=4, dtype="bfloat16", reduce_dtype="float32")),
    "usp, native": (STEP, dict(cp=4, cp_attention="usp", cp_ulysses=2, algorithm="native")),
    "lamb": (STEP | COUNTED, dict(dp=2, zero=1, optimizer="lamb")),
    "muon, a pipeline": (
        STEP | COUNTED, dict(pp=2, microbatches=4, zero=1, optimizer="muon")
    ),
    "slices": (STEP, dict(pp=2, schedule="seq1f1b", microbatches=2)),
    "tp 2d": (STEP, dict(tp=4, tp_layout="2d")),
    "documents, cp": (STEP | DOCUMENTS, dict(model=replace(MODEL, documents=True), cp=2)),
    "powersgd": (STEP, dict(dp=2, compress="powersgd")),
    "1-bit adam": (STEP | STEPS, dict(dp=2, compress=("onebit-adam", {"warmup": 1}))),
    "1-bit lamb": (
        STEP | STEPS, dict(dp=2, compress=("onebit-lamb", {"warmup": 1}), optimizer="lamb")
    ),
    "experts in chunks": (STEP | SENT, dict(model=EXPERTS, dp=4, ep=4, dispatch=("chunks", {"node_size": 2}))),
    "experts shadowed": (STEP | SHADOWED, dict(model=EXPERTS, dp=4, ep=4, dispatch="shadow")),
    "experts": (STEP | ROUTED, dict(model=replace(EXPERTS, balance_bias=True, balance_coef=0.0), tp=2)),
    "experts, bfloat16": (STEP | BY_KERNEL, dict(model=EXPERTS, dtype="bfloat16")),
    "experts sent": (STEP | SENT, dict(model=EXPERTS, dp=4, ep=4, dispatch=("all-to-all", {"node_size": 2}))),
    "experts choose": (STEP | SENT, dict(model=replace(EXPERTS, router="expert_choice", top_k=1), dp=2, ep=2)),
}  # fmt: skip


def waits_of_a_step(world, config, text):
    """What the second step reads: the first may make things, and agree on shapes."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    train_step(world, state, config, text, 0)
    with host_waits() as found:
        train_step(world, state, config, text, 1)
    return dict(found)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_only_what_it_must(name):
    declared, options = CASES[name]
    config = BASE.choosing(**options)
    by_rank = minipar.run(
        waits_of_a_step, config, load_data(config)[0], world_size=config.world_size, timeout_s=30
    )
    for found in by_rank:
        assert found.keys() <= declared.keys() | ON_CPU.keys(), set(found) - set(declared)
        assert found["train/step.py train_step"] == 1
    assert set().union(*by_rank) - ON_CPU.keys() == declared.keys(), "declared, and no longer read"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        bool,
        float,
        torch.nonzero,
        lambda x: torch.ones(1)[x > 0],
        lambda x: torch.bincount(x.long()),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_every_kind_of_read_is_seen(read):
    with host_waits() as found:
        Handle().run(
            lambda: read(torch.ones(1))
        )  # of minipar, whichever: only its functions' reads are counted
    assert found == {"comm/transport/stream.py Handle.run": 1}
