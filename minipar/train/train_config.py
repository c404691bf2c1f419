"""What a training run is: model, batch, optimizer, mesh. Everything is checked here, before a rank starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from minipar.errors import one_of
from minipar.model import ModelConfig
from minipar.runtime.launch import MAX_RANKS, under_torchrun
from minipar.train.check_config import check_layout
from minipar.train.recompute import RECOMPUTE

AXES = ("pp", "dp", "cp", "tp", "ep")
ON_NAN = ("stop", "skip")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainConfig:
    """A run of `minipar train`. The defaults train 0.87 M parameters to a loss below 2 in 150 steps.

    Raises ValueError where a part is impossible, or parts do not fit each other.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """the model; its numbers depend on this and on the seed, never on the mesh"""
    moe: int = 0
    """experts in every second layer, Switch-style; the same as --model.num-experts, which this overrides unless 0"""

    dp: int = 1
    """data-parallel ranks: each works on an equal part of the batch"""
    pp: int = 1
    """pipeline ranks: each has an equal part of the layers"""
    cp: int = 1
    """context-parallel ranks: each has a part of every sample's tokens"""
    ep: int = 1
    """expert-parallel ranks, among those of dp x cp: each has a part of the experts"""
    tp: int = 1
    """tensor-parallel ranks: each has a part of every matrix"""

    zero: int = 0
    """ZeRO stage: 0 DDP, 1 cuts optimizer state over dp x cp, 2 gradients too, 3 parameters too"""
    schedule: str = "1f1b"
    """of the pipeline: gpipe, breadth-first, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v or zb-auto"""
    chunks: int | None = None
    """stages a pipeline rank holds, where the schedule leaves a choice"""
    sequence_parallel: bool = False
    """tp ranks split tokens where they do not split features"""
    cp_layout: str = "zigzag"
    """which tokens a context-parallel rank has: zigzag, contiguous or striped"""
    cp_attention: str = "ring"
    """how it sees the others': ring, ulysses or all_gather"""
    recompute: str = "none"
    """activations that are computed again in the backward: none, selective (attention) or full (blocks)"""
    partition_activations: bool = False
    """with recompute=full, tp ranks keep a part each of the blocks' inputs (ZeRO-R)"""
    offload_activations: bool = False
    """what the backward needs waits in CPU memory, pinned where there is a GPU"""

    steps: int = 150
    """optimizer steps"""
    batch_size: int = 16
    """samples a step, over all ranks"""
    seq_len: int = 256
    """tokens a sample"""
    microbatches: int = 1
    """parts in which a rank works through its samples, accumulating gradients"""

    lr: float = 5e-3
    """highest learning rate of AdamW"""
    warmup: int = 20
    """steps in which the learning rate rises to `lr`; then it falls along a cosine to a tenth of it"""
    weight_decay: float = 0.1
    """of AdamW, on matrices"""
    grad_clip: float = 1.0
    """largest gradient norm, over the whole model; 0 clips nothing"""
    on_nan: str = "stop"
    """where the loss or the gradient norm is not a number: stop, or skip the update and count it"""

    seed: int = 0
    """decides initial weights, batches and dropout masks"""
    dtype: str = "float32"
    """of weights and computation: float32, float64 or bfloat16; zero 1 and 2 update a bfloat16 model's float32 copies"""

    text: Path | None = None
    """a file to train on, read as bytes; none: the Python language reference that comes with Python"""
    eval_every: int = 0
    """steps between measurements of the loss on the last twentieth of the text, which is then not trained on; 0: none"""
    verify_steps: int = 20
    """how many first steps are run again on one process and compared"""
    trace_steps: int = 3
    """how many steps, in the middle, are recorded for the timeline"""
    bucket_mb: float = 1.0
    """megabytes of gradients that are all-reduced at once"""
    timeout_s: float = 60.0
    """how long one message may take before the run is stopped"""

    checkpoint_every: int = 0
    """steps between checkpoints, in the run's folder; 0: none"""
    keep: int = 3
    """how many of the newest checkpoints stay; 0: all"""
    resume: Path | None = None
    """the folder of a run to continue, on this mesh, from its newest whole checkpoint; if it is this run's own and has
    none, start"""

    tensorboard: bool = False
    """write the metrics for TensorBoard too, in the run's folder"""
    peak_tflops: float = 0.0
    """what one device could do at best, in 1e12 floating point operations a second; given it, metrics have the MFU"""

    out: Path | None = None
    """the folder to write to; none: runs/NAME"""
    name: str | None = None
    """NAME; none: after the mesh, as dp4"""

    def __post_init__(self):
        for name in (*AXES, "steps", "batch_size", "seq_len", "microbatches"):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        for name in (
            "warmup",
            "weight_decay",
            "grad_clip",
            "verify_steps",
            "trace_steps",
            "eval_every",
            "checkpoint_every",
            "keep",
            "peak_tflops",
            "moe",
        ):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("lr", "bucket_mb", "timeout_s"):
            self._require(name, getattr(self, name) > 0, "a number above 0")
        self._require("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1")
        self._require("dtype", self.dtype in DTYPES, one_of(DTYPES))
        self._require("zero", self.zero in (0, 1, 2, 3), "0, 1, 2 or 3")
        self._require("recompute", self.recompute in RECOMPUTE, one_of(RECOMPUTE))
        self._require("on_nan", self.on_nan in ON_NAN, one_of(ON_NAN))
        if self.moe:
            object.__setattr__(self, "model", replace(self.model, num_experts=self.moe))
        if self.world_size > MAX_RANKS and not under_torchrun():
            raise ValueError(
                f"{self.mesh_name} makes {self.world_size} ranks on one machine; use at most {MAX_RANKS}"
            )
        if self.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"seq_len={self.seq_len} exceeds max_seq_len={self.model.max_seq_len}; "
                f"use {self.model.max_seq_len} or fewer"
            )
        if self.model.vocab_size < 256:
            raise ValueError(f"vocab_size={self.model.vocab_size} does not hold every byte; use 256 or more")
        check_layout(self)

    def _require(self, name: str, good: bool, works: str) -> None:
        if not good:
            raise ValueError(f"{name}={getattr(self, name)} is out of range; use {works}")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def mesh_sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def folder(self) -> Path:
        return self.out if self.out is not None else Path("runs") / (self.name or self.mesh_name)

    @property
    def mesh_name(self) -> str:
        """The axes that split something, as dp2-tp2; one process is dp1."""
        return "-".join(f"{axis}{n}" for axis, n in self.mesh_sizes.items() if n > 1) or "dp1"
