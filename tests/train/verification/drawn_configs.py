"""Any configuration that `minipar train` accepts, small: every option of the model, the trainer and the extras is drawn."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from minipar.config.choices import ALGORITHMS, AVERAGINGS, CHOSEN
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.extras.tensor_grids.limits import grid_shape
from minipar.model import Transformer
from minipar.model.huggingface import huggingface_name
from minipar.schedules.registry import SCHEDULES
from minipar.support.atomic_files import write_whole
from minipar.support.errors import divisors
from minipar.train.checkpoint.export import llama_config
from tests.strategies import config_of

# No number of a run depends on these.
NOT_DRAWN = {
    "out": "the name of a folder",
    "name": "the name of a folder",
    "tensorboard": "writes the same metrics a second time",
    "peak_tflops": "divides the measured speed",
    "timeout_s": "how long a message may take",
}
TRIES = 60
# (tp_layout, depth) by the number of tp ranks
GRIDS = {2: [("2.5d", 2)], 3: [("2.5d", 3)], 4: [("2d", 1), ("2.5d", 4)], 8: [("2.5d", 2), ("3d", 1)]}
LAYOUTS = {tp: [("1d", 1), *grids] for tp, grids in GRIDS.items()}
SLICED = tuple(name for name, schedule in SCHEDULES.usable().items() if schedule.sliced)
FREE_CHUNKS = tuple(name for name, schedule in SCHEDULES.usable().items() if schedule.chunks is None)
UNCOMPARED = {"zero-one-adam": "lossy from its first step, with no form in one process"}
AVERAGES = {
    name: getattr(choice, "averages", "")
    for name, choice in AVERAGINGS.usable().items()
    if name not in UNCOMPARED
}
CODECS, MOMENTA, LOCAL = (
    tuple(name for name, averaged in AVERAGES.items() if averaged == one)
    for one in ("gradient", "momentum", "weights")
)
# Taking the graph of a model takes a second or two, compiling it to C++ tens of seconds: both are drawn seldom.
COMPILED = ["eager", "eager", "eager", "aot_eager", "aot_eager", "inductor"]
SMALL_VOCABULARY = 60


class Files(NamedTuple):
    """What drawn configurations read: texts, token files, a tokenizer, and the folder for Llamas and offloaded states."""

    folder: Path
    text: Path
    tokens: tuple[Path, ...]
    tokenizer: Path

    @staticmethod
    def write(folder: Path) -> Files:
        """Write a text, its tokenizer of 280 tokens, and token ids below SMALL_VOCABULARY in three formats."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        folder.mkdir(exist_ok=True)
        text = "".join(f"rank {i * i % 97} sends part {i} to the next, über alle\n" for i in range(400))
        files = Files(
            folder,
            folder / "text.txt",
            tuple(folder / name for name in ("16.npy", "32.npy", "tokens.bin")),
            folder / "tokenizer.json",
        )
        write_whole(files.text, text)
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
        made.save(str(files.tokenizer))
        ids = np.random.default_rng(0).integers(0, SMALL_VOCABULARY, 5000)
        np.save(files.tokens[0], ids.astype(np.uint16))
        np.save(files.tokens[1], ids.astype(np.uint32))
        ids.astype(np.uint16).tofile(files.tokens[2])
        return files


def drawn_config(seed: int, number: int, files: Files) -> TrainConfig:
    """Draw configuration `number` of `seed`; each is drawn alone, so that one can be run again."""
    rng = Random(f"{seed} {number}")
    while True:
        axes = _draw_axes(rng)
        schedule = rng.choice(list(SCHEDULES) if axes["pp"] > 1 else ["1f1b", "gpipe", "zb-h1", "seq1f1b"])
        compress = rng.choice(["none"] * 4 + [rng.choice([*CODECS, *MOMENTA, *LOCAL, "delayed"])])
        compiled = rng.choice(COMPILED) if rng.random() < 0.05 and axes["tp"] == axes["cp"] == 1 else "none"
        experts = compiled == "none" and rng.random() < 0.5
        # Of what is drawn most does not fit together: without many tries for one mesh, nearly all would be small.
        for _ in range(TRIES):
            try:
                config = _draw(rng, axes, schedule, compress, compiled, experts, files)
                config = _scaled(Random(f"wavelengths {seed} {number}"), _draw_run(rng, config, files))
                config = _of_family(Random(f"family {seed} {number}"), config)
                return _from_folder(rng, config, files)
            except ValueError:
                continue


def _scaled(rng: Random, config: TrainConfig) -> TrainConfig:
    """Return the configuration, sometimes with longer wavelengths."""
    scaling = rng.choice([None, None, None, (4.0,), (8.0, 1.0, 4.0, 16.0)])
    return replace(config, model=replace(config.model, rope_scaling=scaling))


def _of_family(rng: Random, config: TrainConfig) -> TrainConfig:
    """Return the configuration, sometimes with what tells Qwen's models from Llamas; a grid of ranks takes only some."""
    model = config.model
    if model.kv_latent_dim:
        return config
    head_dim = rng.choice([None, None, 2, 6])
    switches = {
        name: config.tp_layout in ("1d", "ted") and rng.random() < 0.3 for name in ("qkv_bias", "qk_norm")
    }
    return replace(config, model=replace(model, head_dim=head_dim, **switches))


def _from_folder(rng: Random, config: TrainConfig, files: Files) -> TrainConfig:
    """Return the configuration, sometimes with the weights of a Llama or Qwen of its sizes, drawn from another seed."""
    model, seed = config.model, rng.randrange(1000)
    if rng.random() < 0.8 or model.num_experts or model.parallel_block or model.kv_latent_dim:
        return config
    if model.qkv_bias and model.qk_norm:
        return config  # no family has both
    folder = files.folder / f"llama-{seed}-{config.seed}"
    folder.mkdir(exist_ok=True)
    weights = dict(Transformer(replace(model, dropout=0.0), seed, dtype=torch.float32).named_parameters())
    save_file(
        {huggingface_name(name): w.detach().clone() for name, w in weights.items()},
        folder / "model.safetensors",
    )
    write_whole(folder / "config.json", json.dumps(llama_config(model)))
    return replace(config, init=folder)


def _draw_run(rng: Random, config: TrainConfig, files: Files) -> TrainConfig:
    """Return the configuration, sometimes of a whole run: with checkpoints, held-out text, and a second run from the first.

    resume  a folder: the run is stopped after its first checkpoint and goes on; with membership=elastic on another mesh
    """
    if rng.random() < 0.85 or config.dtype not in ("float64", "float32") or config.compress != "none":
        return config
    if config.products != "plain" and config.dtype == "float32":
        return config  # a number rounded the other way on two meshes is compared step by step alone
    steps, resume = rng.choice([2, 3, 4]), rng.choice([None, files.folder / "run"])
    return replace(
        config,
        steps=steps,
        checkpoint_every=rng.choice([1, 2]) if steps > 2 else 1,
        keep=rng.choice([0, 1, 5] if resume is None else [0, 5]),
        eval_every=rng.choice([0, 1, 2]),
        verify_steps=rng.choice([0, 1, 20]),
        trace_steps=rng.choice([0, 1]),
        resume=resume,
        membership=rng.choice(list(CHOSEN["membership"])),
    )


def options_of(config: TrainConfig) -> dict[str, object]:
    """Every option by name, those of the model as `model.name`, of a choice such as sign as `compress=sign.name`."""
    mine = {f.name: getattr(config, f.name) for f in fields(config)}
    mine |= {f"model.{f.name}": getattr(config.model, f.name) for f in fields(config.model)}
    for name, own in config.options.items():
        chosen = f"{name}={getattr(config, name)}"
        mine |= {f"{chosen}.{f.name}": getattr(own, f.name) for f in fields(own)}
    return {name: value for name, value in mine.items() if name not in (*NOT_DRAWN, "model", "options")}


def _draw_axes(rng: Random) -> dict[str, int]:
    """Draw the sizes of a mesh of 2 to 8 ranks."""
    while True:
        axes = dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
        room = rng.choice([2, 3, 4, 4, 5, 6, 7, 8, 8, 8])
        for axis in rng.sample(list(axes), 4):
            axes[axis] = rng.choice(divisors(room))
            room //= axes[axis]
        if max(axes.values()) > 1:
            return axes


def _draw(
    rng: Random,
    axes: dict[str, int],
    schedule: str,
    compress: str,
    compiled: str,
    experts: bool,
    files: Files,
) -> TrainConfig:
    pick, chance = rng.choice, lambda p: rng.random() < p
    data = axes["dp"] * axes["cp"]
    seq_len = pick([4, 6, 8, 12, 16, 17, 24, 32])
    dtype = pick(["float64"] * 8 + ["float32", "bfloat16", "float16"])
    mixed = dtype in ("bfloat16", "float16")
    data_of = _draw_data(rng, files)
    model = _draw_model(rng, seq_len, experts, mixed, data_of)
    microbatches = pick([1, 1, 2, 3, 4])
    zero = pick([0, 1, 2, 3] if compress in ("none", *CODECS) else [0, 3] if compress == "delayed" else [0])
    steps = pick([1, 2, 3] if compress == "none" else [2, 3, 4, 6])
    recompute = pick(["none", "none", "selective", "full", "every:2"] if compiled == "none" else ["none"])
    sequence_parallel, cp_attention = chance(0.5), pick(["ring", "ulysses", "all_gather", "usp"])
    partial = recompute not in ("none", "selective") and not sequence_parallel
    # On a grid of ranks a batch needs a sample for every row, and activations are cut in no other way.
    layout, depth = pick(LAYOUTS.get(axes["tp"], [("1d", 1)]))
    rows = grid_shape(axes["tp"], layout, depth)[0] if layout != "1d" else 1
    sequence_parallel, partial = sequence_parallel and rows == 1, partial and rows == 1
    lr_scale = pick(["none", "none", "linear", "sqrt"])
    ep = pick(divisors(data)) if experts else 1
    if ep > 1 and axes["tp"] > 1 and layout == "1d" and chance(0.3):
        layout = "ted"
    return config_of(
        model=model,
        **data_of,
        moe=pick([0, 0, model.num_experts]),
        **axes,
        ep=ep,
        zero=zero,
        replicate=pick(divisors(data)) if zero == 3 else 1,
        reduce_every=pick(["step", "microbatch"]) if zero == 2 else "step",
        gather_every=pick(["microbatch", "stage"]) if zero == 3 else "microbatch",
        schedule=(schedule, _draw_schedule(rng, schedule)),
        chunks=pick([None, 1, 2, 3]) if schedule in FREE_CHUNKS else None,
        dp_speeds=_draw_speeds(rng, axes["dp"]) if compress == "none" else None,
        layer_costs=pick(["computed", "measured"]),
        sequence_parallel=sequence_parallel,
        tp_chunked=sequence_parallel and chance(0.5),
        tp_layout=(layout, {"depth": depth} if layout == "2.5d" else {}),
        pad_vocab=chance(0.5),
        cp_layout=pick(["zigzag", "contiguous", "striped"]),
        cp_attention=cp_attention,
        cp_ulysses=pick(divisors(axes["cp"])) if cp_attention == "usp" else 1,
        dispatch=_draw_dispatch(rng, divisors(data), ep) if experts else "all-to-all",
        algorithm=pick(list(ALGORITHMS)),
        products=_draw_products(rng, axes["tp"]) if layout == "1d" and not experts else "plain",
        compress=_draw_compress(rng, compress, steps),
        recompute=recompute,
        partition_activations=partial and chance(0.5),
        keep_messages=recompute not in ("none", "selective") and chance(0.5),
        offload_activations=chance(0.2) and compiled == "none",
        compile=compiled,
        offload=pick(["none", "none", "cpu", "disk", ("disk", {"folder": files.folder})]) if zero else "none",
        bucket_mb=pick([1.0, 0.02, 0.004]),
        steps=steps,
        batch_size=axes["dp"] * microbatches * rows * pick([1, 1, 2, 2]),
        seq_len=seq_len,
        microbatches=microbatches,
        optimizer={"onebit-lamb": "lamb"}.get(compress) or pick(["adamw", "adamw", "lamb", "muon"]),
        lr=pick([5e-3, 1e-2]),
        lr_scale=lr_scale,
        lr_batch_size=None if lr_scale == "none" else pick([1, 4, 16]),
        warmup=pick([0, 1, 2]),
        weight_decay=pick([0.0, 0.1]),
        grad_clip=pick([0.0, 1e-3, 1.0]),
        dtype=dtype,
        reduce_dtype=pick([None, "float32", "float64", "bfloat16", dtype]) if mixed else None,
        loss_scale=pick([65536.0, 1024.0]) if dtype == "float16" else pick([65536.0, 65536.0]),
        on_nan=pick(["stop", "skip"]) if compress == "none" else "stop",
        seed=rng.randrange(2**63),
        sampling=pick(["random", "epoch"]),
        timeout_s=3600 if compiled == "inductor" else 300,  # each rank compiles, on however busy a machine
    )


def _draw_speeds(rng: Random, dp: int) -> list[float] | None:
    """Draw a speed for each dp rank, or none. A list, because `config_of` takes a tuple for a choice and its options."""
    return [rng.choice([1, 1.5, 4]) for _ in range(dp)] if rng.random() < 0.2 else None


def _draw_schedule(rng: Random, schedule: str) -> dict:
    """Draw the options of a schedule that has some."""
    if schedule == "offloaded":
        return {"of": rng.choice(["1f1b", "gpipe", "interleaved"]), "limit": rng.choice([1, 2])}
    return {"slices": rng.choice([2, 2, 3, 4])} if schedule in SLICED else {}


def _draw_data(rng: Random, files: Files) -> dict[str, Path]:
    """Draw what is read: the text that comes with Python, another one, its tokens by a tokenizer, or a file of tokens."""
    return rng.choice(
        [
            {},
            {"text": files.text},
            {"text": files.text, "tokenizer": files.tokenizer},
            {"tokens": rng.choice(files.tokens)},
        ]
    )


def _draw_compress(rng: Random, name: str, steps: int) -> tuple[str, dict]:
    """Draw the options of what averages gradients."""
    pick = rng.choice
    if name in ("none", "delayed"):
        return name, {"delay": pick([0, 1, 2, 5])} if name == "delayed" else {}
    own = {"warmup": steps if name in (*MOMENTA, *LOCAL) else pick([0, 1, steps])}
    if name in LOCAL:
        own["every"] = pick(divisors(steps))
    if name in ("topk", "tagc"):
        own["fraction"] = pick([0.05, 0.5, 1.0])
    if name == "powersgd":
        own["rank"] = pick([1, 4, 48])
    return name, own


def _draw_products(rng: Random, tp: int) -> tuple[str, dict]:
    """Draw how linear layers multiply; blocks of features, which tp may not cut, are larger than most drawn models."""
    pick = rng.choice
    name = "plain" if rng.random() < 0.8 else pick(["fp8"] if tp > 1 else ["fp8", "mxfp8", "mxfp4", "nvfp4"])
    own = {"gradients": pick(["e4m3", "e5m2"])} if name in ("fp8", "mxfp8") else {}
    return name, own | ({"scale": pick(["floor", "ceil"])} if name in ("mxfp8", "mxfp4") else {})


def _draw_dispatch(rng: Random, node_sizes: list[int], ep: int) -> tuple[str, dict]:
    """Draw a way for tokens to reach their experts, with all its options."""
    name = rng.choice(["all-to-all", "chunks", "shadow", "balance"] if ep > 1 else ["all-to-all"])
    own = {"chunks": rng.choice([1, 2, 3])} if name == "chunks" else {}
    own |= {"rows": rng.choice([0.0, 2.5])} if name == "shadow" else {}
    own |= {"every": rng.choice([1, 2])} if name == "balance" else {}
    return name, own | {"node_size": rng.choice([None, *node_sizes])}


def _draw_model(rng: Random, seq_len: int, experts: bool, mixed: bool, data: dict[str, Path]) -> ModelConfig:
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
    latent = {"num_kv_heads": pick(divisors(num_heads))}
    if chance(0.25):
        latent = {"kv_latent_dim": pick([3, 4, 8]), "rope_dim": pick([None, 2, 4])}
    sizes = [280, 300] if "tokenizer" in data else [256, 257, 260, 264, 300]
    return ModelConfig(
        vocab_size=pick([SMALL_VOCABULARY, 64, 300] if "tokens" in data else sizes),
        dim=num_heads * pick([2, 4, 6]),
        num_layers=pick([1, 2, 3, 4, 4, 6]),
        num_heads=num_heads,
        **latent,
        hidden_dim=pick([None, 8, 12, 24]),
        max_seq_len=seq_len + pick([0, 8]),
        norm_eps=pick([1e-5, 1e-2]),
        rope_theta=pick([10000.0, 10.0]),
        tie_embeddings=chance(0.5),
        dropout=pick([0.0, 0.1, 0.5]),
        attention=pick(["fused", "plain", "flash"]),
        documents=chance(0.2),
        parallel_block=chance(0.3),
        **options,
    )
