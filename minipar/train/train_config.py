"""The configuration of a run: model, batch, optimizer, mesh. All is checked before any rank starts. Imports no torch."""

# longer than 250 lines because it is one table of options

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from minipar.model.llama_config import sizes_from
from minipar.model.model_config import ModelConfig
from minipar.options import check_types, normalise_types, option, with_option_table
from minipar.runtime.environment import MAX_RANKS, under_torchrun
from minipar.schedules.registry import ScheduleName
from minipar.train.check_config import check_data, check_layout
from minipar.train.check_paths import check_elastic
from minipar.train.compression_config import MethodName, check_compression

if TYPE_CHECKING:
    import torch

AXES = ("pp", "dp", "cp", "tp", "ep")


@with_option_table
@dataclass(frozen=True)
class TrainConfig:
    """A run of `minipar train`. The defaults train 0.87 M parameters to a loss below 2 in 150 steps.

    Raises ValueError where a value is out of range, or values do not fit each other.
    """

    model: ModelConfig = field(
        default_factory=ModelConfig, metadata={"help": "the model's sizes: see ModelConfig"}
    )
    moe: int = option(
        0, "experts in every second layer, Switch-style; unless 0, in place of --model.num-experts", "mixture"
    )

    dp: int = option(1, "data-parallel ranks: each works on an equal part of the batch", "mesh")
    pp: int = option(1, "pipeline ranks: each has an equal part of the layers", "mesh")
    cp: int = option(1, "context-parallel ranks: each has a part of every sample's tokens", "mesh")
    ep: int = option(
        1, "expert-parallel ranks, among those of dp x cp: each has a part of the experts", "mesh"
    )
    tp: int = option(1, "tensor-parallel ranks: each has a part of every matrix", "mesh")
    zero: Literal[0, 1, 2, 3] = option(
        0, "ZeRO stage: 0 DDP, 1 cuts optimizer state over dp x cp, 2 gradients too, 3 parameters too", "mesh"
    )
    replicate: int = option(
        1, "with zero 3, how many groups of the dp x cp ranks have all the shards: hybrid sharding", "mesh"
    )
    reduce_every: Literal["step", "microbatch"] = option(
        "step",
        "when zero 2 reduces gradients: step, as zero 1, sends least, and holds whole gradients until then; "
        "microbatch sends them all each time, and holds 1/dp of them",
        "mesh",
    )
    schedule: ScheduleName = option("1f1b", "order of the pipeline's work", "mesh")
    chunks: int | None = option(
        None, "stages a pipeline rank holds, where the schedule leaves a choice", "mesh"
    )
    seq_slices: int = option(
        1,
        "with schedule terapipe or seq1f1b, slices of a sample's tokens that pass through the stages one behind the other; "
        "later ones, whose tokens attend to more, are shorter",
        "mesh",
    )
    sequence_parallel: bool = option(False, "tp ranks split tokens where they do not split features", "mesh")
    tp_chunked: bool = option(
        False,
        "with sequence_parallel, tp's messages in chunks, while the products of other chunks run",
        "mesh",
    )
    tp_layout: Literal["1d", "2d", "2.5d", "3d"] = option(
        "1d",
        "how tp cuts a matrix: 1d along one dim; 2d over a square of ranks, 2.5d over tp_depth squares, 3d over a cube, "
        "where no rank holds a whole matrix or activation",
        "mesh",
    )
    tp_depth: int = option(1, "with tp_layout=2.5d, how many squares: each has some of the samples", "mesh")
    pad_vocab: bool = option(False, "let tp cut a vocabulary that it does not divide", "mesh")
    cp_layout: Literal["zigzag", "contiguous", "striped"] = option(
        "zigzag", "which tokens a context-parallel rank has", "mesh"
    )
    cp_attention: Literal["ring", "ulysses", "all_gather", "usp"] = option(
        "ring",
        "how a context-parallel rank sees the others' tokens; usp: ulysses inside groups, a ring across them",
        "mesh",
    )
    cp_ulysses: int = option(1, "with cp_attention=usp, the ranks of a group", "mesh")
    ep_node_size: int | None = option(
        None, "send tokens to experts in two levels, inside nodes of so many ep ranks, then across", "mesh"
    )
    ep_chunks: int = option(
        1, "parts in which tokens travel to experts and back, each while another is computed", "mesh"
    )
    ep_once_per_node: bool = option(
        False,
        "with ep_node_size, send a token to each node once, not once for each choice, and copy it there",
        "mesh",
    )
    ep_shadow: float | None = option(
        None,
        "replicate an expert on all ep ranks, for one step of its layer, where that takes more than so many rows off the "
        "busiest rank; none: never",
        "mesh",
    )
    algorithm: Literal[
        "auto", "ring", "halving_doubling", "doubling", "tree", "double_tree", "hierarchical", "bruck", "native"
    ] = option("auto", "of every collective that has it; auto chooses by size, native is torch's own", "mesh")  # fmt: skip

    compress: MethodName = option(
        "none",
        "what goes over dp x cp in place of whole gradients: codecs (sign, int8, fp8, topk; tagc: topk of feed-forward "
        "layers), two thin factors (powersgd), signs of a momentum (onebit-adam, onebit-lamb, zero-one-adam), or "
        "weights, rarely (local-sgd, diloco). Lossy: the losses are no longer those of one process",
        "messages",
    )
    compress_rank: int = option(4, "of powersgd's factors", "messages")
    compress_fraction: float = option(
        0.01, "of the gradients, the largest, that topk and tagc send", "messages"
    )
    compress_every: int = option(
        10,
        "steps that local-sgd, diloco and in the end zero-one-adam go alone between agreements",
        "messages",
    )
    compress_warmup: int | None = option(
        None,
        "first steps that are not compressed (with local-sgd: post-local SGD); none: 30 for onebit-adam, onebit-lamb and "
        "zero-one-adam, which need some, else 0",
        "messages",
    )
    compress_node_size: int | None = option(
        None,
        "compress in two levels: plain inside nodes of so many dp x cp ranks, codec or signs across",
        "messages",
    )

    recompute: Literal["none", "selective", "full"] | str = option(
        "none",
        "activations computed again in the backward: none, attention's (selective), whole blocks' (full), or whole "
        "blocks' of which only every N-th input is kept (every:N)",
        "memory",
    )
    partition_activations: bool = option(
        False,
        "with recompute=full or every:N, tp ranks keep a part each of the kept inputs (ZeRO-R)",
        "memory",
    )
    offload_activations: bool = option(
        False, "what the backward needs waits in CPU memory, pinned where there is a GPU", "memory"
    )
    compile: Literal["none", "eager", "aot_eager", "inductor"] = option(
        "none",
        "torch.compile of every block: inductor makes kernels, on a CPU by a C++ compiler; the others only take the graph",
        "memory",
    )
    offload: Literal["none", "cpu", "disk"] = option(
        "none",
        "with zero 1, 2 or 3, where master weights and optimizer states wait for the update: in CPU memory, or in a file",
        "memory",
    )
    offload_folder: Path | None = option(
        None, "with offload=disk, a folder for that file; none: the system's for temporary files", "memory"
    )
    bucket_mb: float = option(1.0, "megabytes of gradients that are all-reduced at once", "memory")

    steps: int = option(150, "optimizer steps", "optimization")
    batch_size: int = option(16, "samples a step, over all ranks", "optimization")
    seq_len: int = option(256, "tokens a sample", "optimization")
    microbatches: int = option(
        1, "parts in which a rank works through its samples, accumulating gradients", "optimization"
    )
    optimizer: Literal["adamw", "lamb", "muon"] = option(
        "adamw",
        "lamb: a parameter's step is scaled to the parameter's norm, for large batches; muon: the momentum of a matrix is "
        "orthogonalized, with zero 1 or 2 on the one rank that has all of it",
        "optimization",
    )
    lr: float = option(5e-3, "highest learning rate", "optimization")
    lr_scale: Literal["none", "linear", "sqrt"] = option(
        "none",
        "multiply lr by batch_size / lr_batch_size, or by its square root, which suits Adam and LAMB better",
        "optimization",
    )
    lr_batch_size: int | None = option(
        None, "with lr_scale, the batch size that lr was found for", "optimization"
    )
    warmup: int = option(
        20, "steps in which the learning rate rises; then it falls along a cosine to a tenth", "optimization"
    )
    weight_decay: float = option(0.1, "on matrices", "optimization")
    grad_clip: float = option(
        1.0, "largest gradient norm, over the whole model; 0 clips nothing", "optimization"
    )

    dtype: Literal["float32", "float64", "bfloat16", "float16"] = option(
        "float32",
        "of computation; with bfloat16 and float16, float32 master weights are updated; float16 scales the loss",
        "precision",
    )
    reduce_dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = option(
        None, "of the sums of gradients over dp x cp; none: float32, or float64 with that dtype", "precision"
    )
    loss_scale: float = option(
        65536.0,
        "with float16, the first factor of the loss; halved where a gradient overflows, doubled after 2000 good steps",
        "precision",
    )
    on_nan: Literal["stop", "skip"] = option(
        "stop",
        "where the loss or the gradient norm is no number: stop, or skip the update and count it",
        "precision",
    )

    text: Path | None = option(
        None,
        "a file to train on, read as bytes; none: the Python language reference that comes with Python",
        "data",
    )
    tokenizer: Path | None = option(
        None, "a tokenizer.json that encodes text, and decodes what is generated; none: bytes", "data"
    )
    tokens: Path | None = option(
        None,
        "in place of text, a file of token ids, larger than memory or not: .npy of uint16 or uint32, or the bare ids",
        "data",
    )
    sampling: Literal["random", "epoch"] = option(
        "random",
        "random: samples begin anywhere; epoch: every sample comes once before any comes again",
        "data",
    )
    init: Path | None = option(
        None,
        "the folder of a Llama of Hugging Face's to start from, in place of weights made from the seed; the model's sizes "
        "are those of its config.json, and setting one to another value is refused",
        "data",
    )
    seed: int = option(0, "decides initial weights, batches and dropout masks", "data")
    eval_every: int = option(
        0, "steps between measurements of the loss on held-out text, a twentieth of all; 0: none", "data"
    )

    checkpoint_every: int = option(0, "steps between checkpoints, in the run's folder; 0: none", "run")
    keep: int = option(3, "how many of the newest checkpoints stay; 0: all", "run")
    resume: Path | None = option(
        None, "the folder of a run to continue, on this mesh, from its newest whole checkpoint", "run"
    )
    elastic: bool = option(
        False,
        "under torchrun --nnodes MIN:MAX, go on from the newest checkpoint on as many ranks as are left: on this mesh if "
        "it has so many, else on the one that the planner predicts to be fastest",
        "run",
    )
    verify_steps: int = option(20, "how many first steps are run again on one process and compared", "run")
    trace_steps: int = option(3, "how many steps, in the middle, are recorded for the timeline", "run")
    timeout_s: float = option(60.0, "seconds one message may take before the run is stopped", "run")
    tensorboard: bool = option(False, "write the metrics for TensorBoard too, in the run's folder", "run")
    peak_tflops: float = option(
        0.0,
        "a device's best, in 1e12 floating point operations a second; given it, metrics have MFU and HFU",
        "run",
    )
    out: Path | None = option(None, "the folder to write to; none: runs/NAME", "run")
    name: str | None = option(None, "NAME; none: after the mesh, as dp4", "run")

    def __post_init__(self):
        check_types(self)
        normalise_types(self)
        for name in (*AXES, "replicate", "cp_ulysses", "tp_depth", "ep_chunks", "seq_slices", "steps", "batch_size",
                     "seq_len", "microbatches"):  # fmt: skip
            self._require(name, getattr(self, name) >= 1, "1 or more")
        for name in NOT_NEGATIVE:
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("lr", "bucket_mb", "timeout_s", "loss_scale"):
            self._require(name, getattr(self, name) > 0, "a number above 0")
        if self.name is not None and self.name in ("", ".", "..") or "/" in (self.name or ""):
            raise ValueError(f"name={self.name!r} is not the name of one folder; use out for a path")
        self._require("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1")
        if self.moe:
            object.__setattr__(self, "model", replace(self.model, num_experts=self.moe))
        if self.init is not None:
            object.__setattr__(self, "model", sizes_from(self.init, self.model, (ModelConfig(), SMALL)))
        if self.world_size > MAX_RANKS and not under_torchrun():
            raise ValueError(
                f"{self.mesh_name} makes {self.world_size} ranks on one machine; use at most {MAX_RANKS}"
            )
        if self.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"seq_len={self.seq_len} exceeds max_seq_len={self.model.max_seq_len}; "
                f"use {self.model.max_seq_len} or fewer"
            )
        check_data(self)
        check_layout(self)
        check_compression(self)
        check_elastic(self)

    def _require(self, name: str, good: bool, works: str) -> None:
        if not good:
            raise ValueError(f"{name}={getattr(self, name)} is out of range; use {works}")

    @property
    def highest_lr(self) -> float:
        """The learning rate after the warmup: lr, scaled from lr_batch_size samples a step to batch_size.

        linear  lr * batch_size / lr_batch_size         Goyal et al., arXiv:1706.02677, section 2.1
        sqrt    lr * sqrt(batch_size / lr_batch_size)   Krizhevsky, arXiv:1404.5997; for Adam, arXiv:2205.10287
        """
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scale]
        return self.lr * (self.batch_size / (self.lr_batch_size or self.batch_size)) ** power

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def mesh_sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    @property
    def mixed_precision(self) -> bool:
        """Whether the model is computed in half precision, and float32 master weights of it are updated."""
        return self.dtype in ("bfloat16", "float16")

    @property
    def torch_master_dtype(self) -> torch.dtype:
        """The dtype of what the optimizer updates, and by default of the reduction of gradients."""
        import torch

        return torch.float32 if self.mixed_precision else self.torch_dtype

    @property
    def torch_reduce_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.reduce_dtype) if self.reduce_dtype else self.torch_master_dtype

    @property
    def folder(self) -> Path:
        return self.out if self.out is not None else Path("runs") / (self.name or self.mesh_name)

    @property
    def mesh_name(self) -> str:
        """The axes with more than one rank, as in dp2-tp2, and tp's layout, as in tp4-2d; one process is dp1."""
        axes = [f"{axis}{n}" for axis, n in self.mesh_sizes.items() if n > 1] or ["dp1"]
        return "-".join(axes if self.tp_layout == "1d" else [*axes, self.tp_layout])


NOT_NEGATIVE = (
    "warmup", "weight_decay", "grad_clip", "verify_steps", "trace_steps", "eval_every", "checkpoint_every", "keep",
    "peak_tflops", "moe",
)  # fmt: skip

# The default of `minipar verify`: small, yet with the hard cases (grouped queries, dropout, tied embeddings).
SMALL = ModelConfig(
    dim=32, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=64, dropout=0.1, tie_embeddings=True
)
VERIFY_DEFAULTS = TrainConfig(
    model=SMALL, steps=5, batch_size=8, seq_len=64, warmup=2, dtype="float64", timeout_s=30
)
