"""Any configuration that `minipar train` accepts, small: every option of the model and of the trainer is drawn."""

from __future__ import annotations

from dataclasses import fields
from random import Random

from minipar.errors import divisors
from minipar.model import ModelConfig
from minipar.pipeline import SCHEDULES
from minipar.schedules.registry import SLICED
from minipar.tensor_parallel import grid_shape
from minipar.train.legal_configs import GRIDS
from minipar.train.train_config import TrainConfig

# These decide no number of a step: what a run reads and writes, keeps, prints and compares.
NOT_DRAWN = {
    "model", "steps", "text", "tokens", "tokenizer", "eval_every", "checkpoint_every", "keep", "resume", "verify_steps",
    "trace_steps", "timeout_s", "tensorboard", "peak_tflops", "elastic", "out", "name", "offload_folder", "init",
}  # fmt: skip
NOT_DRAWN |= {"compile"}  # too slow to be drawn
# These change the numbers on purpose.
NOT_DRAWN |= {f"compress{which}" for which in ("", "_rank", "_fraction", "_every", "_warmup", "_node_size")}
TRIES = 60
# (tp_layout, tp_depth) by the number of tp ranks
LAYOUTS = {tp: [("1d", 1), *grids] for tp, grids in {**GRIDS, 2: [("2.5d", 2)]}.items()}
NOT_DRAWN_OF_MODEL = {"norm_eps"}  # a constant of the same formula on every rank


def drawn_config(seed: int, number: int, tokens=None) -> TrainConfig:
    """Draw configuration `number` of `seed`; each is drawn alone, so that one can be run again.

    tokens  a file of token ids to train on; None: drawn configurations train on the text that comes with Python
    """
    rng = Random(f"{seed} {number}")
    while True:
        axes = _draw_axes(rng)
        schedule = rng.choice(list(SCHEDULES) if axes["pp"] > 1 else ["1f1b", "gpipe", "zb-h1", "seq1f1b"])
        experts = rng.random() < 0.5
        # Of what is drawn most does not fit together: without many tries for one mesh, nearly all would be small.
        for _ in range(TRIES):
            try:
                return _draw(rng, axes, schedule, experts, tokens)
            except ValueError:
                continue


def options_of(config: TrainConfig) -> dict:
    """Every option by name, those of the model as `model.name`."""
    mine = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in NOT_DRAWN}
    model = {
        f"model.{f.name}": getattr(config.model, f.name)
        for f in fields(config.model)
        if f.name not in NOT_DRAWN_OF_MODEL
    }
    return mine | model


def _draw_axes(rng: Random) -> dict[str, int]:
    axes = dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
    room = rng.choice([1, 2, 3, 4, 4, 6, 8, 8, 8])
    for axis in rng.sample(list(axes), 4):
        axes[axis] = rng.choice(divisors(room))
        room //= axes[axis]
    return axes


def _draw(rng: Random, axes: dict[str, int], schedule: str, experts: bool, tokens) -> TrainConfig:
    pick, chance = rng.choice, lambda p: rng.random() < p
    data = axes["dp"] * axes["cp"]
    seq_len = pick([4, 6, 8, 12, 16, 17, 24, 32])
    dtype = pick(["float64"] * 8 + ["float32", "bfloat16", "float16"])
    mixed = dtype in ("bfloat16", "float16")
    model = _draw_model(rng, seq_len, experts, mixed)
    microbatches = pick([1, 1, 2, 3, 4])
    zero = pick([0, 1, 2, 3])
    recompute = pick(["none", "none", "selective", "full", "every:2"])
    sequence_parallel, cp_attention = chance(0.5), pick(["ring", "ulysses", "all_gather", "usp"])
    partial = recompute not in ("none", "selective") and not sequence_parallel
    # On a grid of ranks a batch needs a sample for every row, and activations are cut in no other way.
    layout, depth = pick(LAYOUTS.get(axes["tp"], [("1d", 1)]))
    rows = grid_shape(axes["tp"], layout, depth)[0] if layout != "1d" else 1
    sequence_parallel, partial = sequence_parallel and rows == 1, partial and rows == 1
    # Compiling takes long, so it is drawn seldom: only where it is legal, and then once in three.
    alone = axes["tp"] == axes["cp"] == 1 and not experts and zero < 3 and not schedule.startswith("zb")
    compiled = pick(["none", "none", "eager"]) if alone and recompute == "none" else "none"
    lr_scale = pick(["none", "none", "linear", "sqrt"])
    ep = pick(divisors(data)) if experts else 1
    ep_node_size = pick([None, *divisors(data)]) if experts else None
    ep_shadow = pick([None, None, 0.0, 2.5]) if ep > 1 else None
    return TrainConfig(
        model=model,
        tokens=tokens if chance(0.5) else None,
        moe=pick([0, 0, model.num_experts]),
        **axes,
        ep=ep,
        zero=zero,
        replicate=pick(divisors(data)) if zero == 3 else 1,
        reduce_every=pick(["step", "microbatch"]) if zero == 2 else "step",
        schedule=schedule,
        seq_slices=pick([1, 2, 2, 3, 4]) if schedule in SLICED else 1,
        chunks=pick([None, 1, 2, 3]) if schedule in ("breadth-first", "interleaved", "hanayo") else None,
        sequence_parallel=sequence_parallel,
        tp_chunked=sequence_parallel and chance(0.5),
        tp_layout=layout,
        tp_depth=depth,
        pad_vocab=chance(0.5),
        cp_layout=pick(["zigzag", "contiguous", "striped"]),
        cp_attention=cp_attention,
        cp_ulysses=pick(divisors(axes["cp"])) if cp_attention == "usp" else 1,
        ep_node_size=ep_node_size,
        ep_chunks=pick([1, 2, 3]) if ep > 1 and ep_shadow is None else 1,
        ep_once_per_node=ep_node_size is not None and ep_shadow is None and chance(0.5),
        ep_shadow=ep_shadow,
        algorithm=pick(
            [
                "auto",
                "ring",
                "halving_doubling",
                "doubling",
                "tree",
                "double_tree",
                "hierarchical",
                "bruck",
                "native",
            ]
        ),
        recompute=recompute,
        partition_activations=partial and chance(0.5),
        offload_activations=chance(0.2) and compiled == "none",
        compile=compiled,
        offload=pick(["none", "none", "cpu", "disk"]) if zero else "none",
        bucket_mb=pick([1.0, 0.02, 0.001]),
        steps=pick([1, 2, 3]),
        batch_size=axes["dp"] * microbatches * rows * pick([1, 1, 2, 3]),
        seq_len=seq_len,
        microbatches=microbatches,
        optimizer=pick(["adamw", "lamb"]),
        lr=pick([5e-3, 1e-2]),
        lr_scale=lr_scale,
        lr_batch_size=None if lr_scale == "none" else pick([1, 4, 16]),
        warmup=pick([0, 1, 2]),
        weight_decay=pick([0.0, 0.1]),
        grad_clip=pick([0.0, 1e-3, 1.0]),
        dtype=dtype,
        reduce_dtype=pick([None, "float32", "float64", "bfloat16", dtype]) if mixed else None,
        loss_scale=pick([65536.0, 1024.0]),
        on_nan=pick(["stop", "skip"]),
        seed=rng.randrange(2**63),
        sampling=pick(["random", "epoch"]),
        timeout_s=30 if compiled == "none" else 300,
    )


def _draw_model(rng: Random, seq_len: int, experts: bool, mixed: bool) -> ModelConfig:
    pick, chance = rng.choice, lambda p: rng.random() < p
    num_heads = pick([2, 3, 4, 6, 8])
    options = {}
    if experts:
        num_experts, router = (
            pick([1, 2, 3, 4, 6, 8]),
            pick(["top_k", "top_k", "noisy_top_k", "expert_choice"]),
        )
        room = [0.1, 0.5, 1.0, 1.25, 2.0, 8.0] + ([None] if router != "expert_choice" else [])
        options = dict(
            num_experts=num_experts,
            top_k=pick([min(2, num_experts), rng.randint(1, num_experts)]),
            capacity_factor=pick(room),
            group_tokens=pick([None, 1, 2, 3, 4, 8]),
            router=router,
            drop_order=pick(["position", "weight"]),
            jitter=pick([0.0, 0.1]),
            balance_coef=pick([0.0, 0.01, 1.0]),
            z_coef=pick([0.0, 1e-3, 0.1]),
            balance_bias=router != "expert_choice" and chance(0.4),
            shared_dim=pick([0, 0, 8, 12, 24]),
            moe_every=pick([1, 2, 3]),
        )
        if router != "expert_choice":
            options["random_second"] = options["top_k"] == 2 and chance(0.7)
            if chance(0.4):
                nodes = pick(divisors(num_experts))
                least = -(-options["top_k"] * nodes // num_experts)
                options |= dict(expert_nodes=nodes, nodes_per_token=rng.randint(least, nodes))
        if mixed:  # rounding would change who is served, by as much of a gradient as an expert has few tokens
            options |= dict(top_k=num_experts, capacity_factor=None, router="top_k", random_second=False)
            options |= dict(expert_nodes=None, nodes_per_token=None)
    return ModelConfig(
        vocab_size=pick([256, 257, 260, 264, 300]),
        dim=num_heads * pick([2, 4, 6]),
        num_layers=pick([1, 2, 3, 4, 6, 8]),
        num_heads=num_heads,
        num_kv_heads=pick(divisors(num_heads)),
        hidden_dim=pick([None, 8, 12, 24]),
        max_seq_len=seq_len + pick([0, 8]),
        rope_theta=pick([10000.0, 10.0]),
        tie_embeddings=chance(0.5),
        dropout=pick([0.0, 0.1, 0.5]),
        attention=pick(["fused", "plain", "flash"]),
        documents=chance(0.2),
        parallel_block=chance(0.3),
        **options,
    )
