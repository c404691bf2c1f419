"""The configuration of a run: model, batch, optimizer, mesh. It is checked before any rank starts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from minipar.config.choices import CHOSEN, TensorLayout
from minipar.config.llama_config import sizes_from
from minipar.config.mesh_rules import shares_by_speed
from minipar.config.model_config import ModelConfig
from minipar.config.rules import BATCH, DATA, RUN, blocks_per_unit, check, view_of
from minipar.schedules import Schedule
from minipar.schedules.registry import make_schedule
from minipar.support.environment import MAX_RANKS, under_torchrun
from minipar.support.errors import one_of
from minipar.support.options import check_types, make_options, normalise_types, option, with_option_table

if TYPE_CHECKING:
    import torch

AXES = ("pp", "dp", "cp", "tp", "ep")
AT_LEAST_ONE = (*AXES, "replicate", "cp_ulysses", "steps", "batch_size", "seq_len", "microbatches")
NOT_NEGATIVE = (
    "warmup", "weight_decay", "grad_clip", "verify_steps", "trace_steps", "eval_every", "checkpoint_every", "keep",
    "peak_tflops", "moe",
)  # fmt: skip
ABOVE_ZERO = ("lr", "bucket_mb", "timeout_s", "loss_scale")


@with_option_table
@dataclass(frozen=True)
class TrainConfig:
    """The configuration of a `minipar train` run. The defaults train 0.87 M parameters to a loss below 2 in 150 steps.

    Raises ValueError if a value is out of range, or values do not fit each other.
    """

    model: ModelConfig = field(
        default_factory=ModelConfig, metadata={"help": "the model's sizes: see ModelConfig"}
    )
    moe: int = option(
        0,
        "number of experts in every second layer, as in Switch; unless 0, it replaces the model's num_experts",
        "mixture",
        common=True,
    )

    dp: int = option(1, "data-parallel ranks: each works on an equal part of the batch", "mesh", common=True)
    dp_speeds: tuple[float, ...] | None = option(
        None,
        "for unequal machines, the speed of each dp rank, in any unit: samples are dealt out in proportion to it, as more "
        "microbatches, or as larger ones where ranks communicate in every microbatch; none: equal parts",
        "mesh",
    )
    pp: int = option(1, "pipeline ranks: each has an equal part of the layers", "mesh", common=True)
    cp: int = option(
        1, "context-parallel ranks: each has a part of every sample's tokens", "mesh", common=True
    )
    ep: int = option(
        1,
        "expert-parallel ranks, among those of dp x cp: each has a part of the experts",
        "mesh",
        common=True,
    )
    tp: int = option(1, "tensor-parallel ranks: each has a part of every matrix", "mesh", common=True)
    zero: Literal[0, 1, 2, 3] = option(
        0,
        "ZeRO stage: 0 is DDP, 1 shards the optimizer state over dp x cp, 2 gradients too, 3 parameters too",
        "mesh",
        common=True,
    )
    replicate: int = option(
        1,
        "with zero 3, the number of groups of dp x cp ranks that each hold all shards: hybrid sharding",
        "mesh",
    )
    reduce_every: Literal["step", "microbatch"] = option(
        "step",
        "when zero 2 reduces gradients: once per step, as zero 1, sends least, but holds unsharded gradients until then; "
        "after every microbatch sends them all each time, but holds only 1/dp of them",
        "mesh",
    )
    gather_every: Literal["microbatch", "stage"] = option(
        "microbatch",
        "when zero 3 gathers parameters: block by block in every microbatch, which holds least; or a stage's, once for all "
        "consecutive microbatches of that stage, which sends least, and suits schedule=breadth-first",
        "mesh",
    )
    schedule: str = option("1f1b", "order of the pipeline's work", "mesh", common=True)
    chunks: int | None = option(
        None, "number of stages on each pipeline rank, for schedules that allow several numbers", "mesh"
    )
    layer_costs: Literal["computed", "measured"] = option(
        "computed",
        "how layers are weighed when they are cut into stages: by their matrices and attention, or by the seconds in which "
        "rank 0 runs each layer forward and backward, before the first step",
        "mesh",
    )
    sequence_parallel: bool = option(
        False, "tp ranks split tokens where they do not split features", "mesh", common=True
    )
    tp_chunked: bool = option(
        False,
        "with sequence_parallel, send tp's messages in chunks, each while the products of another chunk run",
        "mesh",
    )
    tp_layout: str = option(
        "1d", "how tp shards a matrix: 1d along one dim; extras: over a square or a cube of ranks", "mesh"
    )
    pad_vocab: bool = option(False, "allow a vocabulary that tp does not divide", "mesh")
    cp_layout: Literal["zigzag", "contiguous", "striped"] = option(
        "zigzag", "which tokens a context-parallel rank has", "mesh"
    )
    cp_attention: Literal["ring", "ulysses", "all_gather", "usp"] = option(
        "ring",
        "how a context-parallel rank attends to other ranks' tokens; usp: ulysses inside groups, a ring across them",
        "mesh",
        common=True,
    )
    cp_ulysses: int = option(1, "with cp_attention=usp, the number of ranks in a group", "mesh")
    dispatch: str = option(
        "all-to-all",
        "how tokens are sent to the experts of other ep ranks, and the results back",
        "mesh",
        common=True,
    )
    algorithm: str = option(
        "auto",
        "algorithm of every collective that supports it; auto chooses by size, native is torch's own",
        "mesh",
        common=True,
    )
    compress: str = option(
        "none",
        "what is sent over dp x cp instead of full gradients, or when they are applied; with all choices but none losses "
        "differ from those of plain training in one process",
        "messages",
        common=True,
    )

    recompute: Literal["none", "selective", "full"] | str = option(
        "none",
        "activations that the backward recomputes: none, those of attention (selective), those of whole blocks (full), or "
        "those of whole blocks, keeping only every N-th block's input (every:N)",
        "memory",
        common=True,
    )
    partition_activations: bool = option(
        False,
        "with recompute=full or every:N, each tp rank keeps only its part of the kept inputs (ZeRO-R)",
        "memory",
    )
    keep_messages: bool = option(
        False,
        "with recompute=full or every:N, keep what collectives over tp, cp and ep returned in the forward, so that the "
        "recomputation does not send it again",
        "memory",
    )
    offload_activations: bool = option(
        False, "keep saved activations in CPU memory until the backward, pinned if there is a GPU", "memory"
    )
    compile: Literal["none", "eager", "aot_eager", "inductor"] = option(
        "none",
        "torch.compile of every block: inductor generates kernels (on a CPU it needs a C++ compiler) and rounds the "
        "float32 rotary angles differently, so that gradients differ by about 1e-7; the others only capture the graph",
        "memory",
    )
    offload: str = option(
        "none",
        "with zero 1, 2 or 3, where master weights and optimizer states are stored between two updates",
        "memory",
        common=True,
    )
    bucket_mb: float = option(25.0, "megabytes of gradients that are all-reduced at once", "memory")

    steps: int = option(150, "optimizer steps", "optimization", common=True)
    batch_size: int = option(16, "samples per step, over all ranks", "optimization", common=True)
    seq_len: int = option(256, "tokens per sample", "optimization", common=True)
    microbatches: int = option(
        1,
        "parts into which a rank's samples are divided; their gradients accumulate",
        "optimization",
        common=True,
    )
    optimizer: str = option("adamw", "what updates the parameters", "optimization", common=True)
    lr: float = option(5e-3, "highest learning rate", "optimization", common=True)
    lr_scale: Literal["none", "linear", "sqrt"] = option(
        "none",
        "multiply lr by batch_size / lr_batch_size, or by the square root of that, which suits Adam and LAMB better",
        "optimization",
    )
    lr_batch_size: int | None = option(
        None, "with lr_scale, the batch size that lr was found for", "optimization"
    )
    warmup: int = option(
        20, "steps in which the learning rate rises; then it falls along a cosine to a tenth", "optimization"
    )
    weight_decay: float = option(0.1, "weight decay of matrices", "optimization")
    grad_clip: float = option(
        1.0,
        "largest norm of the whole model's gradient, which is clipped to it; 0: no clipping",
        "optimization",
    )

    dtype: Literal["float32", "float64", "bfloat16", "float16"] = option(
        "float32",
        "dtype of the computation; bfloat16 and float16 update float32 master weights, and float16 scales the loss",
        "precision",
        common=True,
    )
    reduce_dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = option(
        None,
        "dtype in which gradients are summed over dp x cp; none: float32, or float64 if dtype is",
        "precision",
    )
    products: str = option(
        "plain",
        "how the blocks' linear layers multiply: plain, as they are; extras round to 8 or 4 bits first, as emulation",
        "precision",
    )
    loss_scale: float = option(
        65536.0,
        "with float16, the initial loss scale; halved if a gradient overflows, doubled after 2000 good steps",
        "precision",
    )
    on_nan: Literal["stop", "skip"] = option(
        "stop",
        "if the loss or the gradient norm is not finite: stop, or skip the update and count it",
        "precision",
    )

    text: Path | None = option(
        None,
        "a file to train on, read as bytes; none: the Python language reference that comes with Python",
        "data",
        common=True,
    )
    tokenizer: Path | None = option(
        None,
        "a tokenizer.json that encodes text, and decodes what is generated; none: bytes",
        "data",
        common=True,
    )
    tokens: Path | None = option(
        None,
        "instead of text, a file of token ids, which may be larger than memory: .npy of uint16 or uint32, or the bare ids",
        "data",
    )
    sampling: Literal["random", "epoch"] = option(
        "random",
        "random: samples begin anywhere; epoch: every sample is used once before any is used again",
        "data",
    )
    init: Path | None = option(
        None,
        "the folder of a Hugging Face Llama, Mistral or Qwen to start from, instead of weights drawn from the seed; the "
        "model's sizes are those of its config.json, and a flag that sets one to another value is an error",
        "data",
        common=True,
    )
    seed: int = option(0, "decides initial weights, batches and dropout masks", "data", common=True)
    eval_every: int = option(
        0,
        "steps between measurements of the loss on held-out text, a twentieth of the text; 0: never",
        "data",
        common=True,
    )

    checkpoint_every: int = option(
        0, "steps between checkpoints, in the run's folder; 0: no checkpoints", "run", common=True
    )
    keep: int = option(3, "how many of the newest checkpoints are kept; 0: all", "run")
    resume: Path | None = option(
        None,
        "the folder of a run to continue, on this mesh, from its newest whole checkpoint",
        "run",
        common=True,
    )
    membership: str = option(
        "fixed", "fixed: the ranks with which the run starts; extras: as many as are left", "run"
    )
    verify_steps: int = option(
        20, "how many steps from the start are repeated in one process and compared", "run"
    )
    trace_steps: int = option(
        3, "how many steps in the middle of the run are recorded for the timeline", "run"
    )
    timeout_s: float = option(60.0, "seconds that one message may take before the run is stopped", "run")
    tensorboard: bool = option(False, "write the metrics for TensorBoard too, in the run's folder", "run")
    peak_tflops: float = option(
        0.0,
        "a device's peak, in 1e12 floating point operations per second; if given, the metrics include MFU and HFU",
        "run",
    )
    out: Path | None = option(None, "the folder to write to; none: runs/NAME", "run", common=True)
    name: str | None = option(None, "NAME; none: after the mesh, as dp4", "run", common=True)

    options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": 'options of the choices made by name, by field: {"schedule": {"slices": 4}}'},
    )

    def __post_init__(self) -> None:
        check_types(self)
        normalise_types(self)
        for name in AT_LEAST_ONE:
            self._require(name, getattr(self, name) >= 1, "1 or more")
        for name in NOT_NEGATIVE:
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ABOVE_ZERO:
            self._require(name, getattr(self, name) > 0, "a number above 0")
        if self.dtype != "float16" and self.loss_scale != TrainConfig.loss_scale:
            raise ValueError(
                f"loss_scale={self.loss_scale:g} is used with float16 alone, and dtype is {self.dtype}; leave it out"
            )
        object.__setattr__(self, "options", _complete_options(self))
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name):
            raise ValueError(f"name={self.name!r} is not the name of one folder; use out for a path")
        self._require("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1")
        if self.moe:
            object.__setattr__(self, "model", replace(self.model, num_experts=self.moe))
        if self.init is not None:
            # A size that is a default, of a run or of verify, was not set by the caller.
            object.__setattr__(self, "model", sizes_from(self.init, self.model, (ModelConfig(), SMALL)))
        blocks_per_unit(self.recompute)  # raises ValueError for an unknown one
        self._check_fit()

    def _check_fit(self) -> None:
        """Raise ValueError, by the rules of a run, if its mesh, model, batch and settings do not fit each other."""
        also: dict[str, Any] = {"fold_experts": False, "equal_microbatches": self.equal_microbatches}
        check(view_of(self, **also), DATA + BATCH)
        # Where a schedule is impossible, this raises ValueError.
        orders = [schedule_of(self, rank) for rank in range(self.dp)]
        layout = self.choice("tp_layout")
        layout.check(self)  # before the rules of a run, which divide by tp
        heads = layout.ranks_of_heads(self)
        also |= {"order": orders[0], "num_stages": orders[0].num_stages, "ranks_of_heads": heads}
        check(view_of(self, **also), RUN)
        for name in CHOSEN:
            if name != "tp_layout":
                self.choice(name).check(self)

    def _require(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise ValueError(f"{name}={getattr(self, name)} is out of range; use {allowed}")

    def choice(self, field: str) -> Any:
        """Return the choice that a field such as "schedule" or "compress" names."""
        return CHOSEN[field][getattr(self, field)]

    def choosing(self, **changes: Any) -> TrainConfig:
        """Return this configuration with some values replaced; give a choice as its name, or as (name, options).

        Example: choosing(pp=2, schedule=("seq1f1b", {"slices": 4}), compress="none"). The options of a replaced choice are
        dropped.
        """
        named = {name: changes.pop(name) for name in list(changes) if name in CHOSEN}
        given = {name: value if isinstance(value, tuple) else (value, {}) for name, value in named.items()}
        kept = changes.pop("options", self.options)
        options = {name: own for name, own in kept.items() if name not in given}
        options |= {name: own for name, (_, own) in given.items() if own}
        return replace(
            self, **changes, **{name: value for name, (value, _) in given.items()}, options=options
        )

    @property
    def highest_lr(self) -> float:
        """The learning rate after the warmup: lr, scaled from a batch of lr_batch_size samples to one of batch_size.

        linear  lr * batch_size / lr_batch_size         Goyal et al., arXiv:1706.02677, section 2.1
        sqrt    lr * sqrt(batch_size / lr_batch_size)   Krizhevsky, arXiv:1404.5997; for Adam, arXiv:2205.10287
        """
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scale]
        factor: float = (self.batch_size / (self.lr_batch_size or self.batch_size)) ** power
        return self.lr * factor

    @property
    def equal_microbatches(self) -> bool:
        """Whether all dp ranks run the same number of microbatches: one each, or they communicate in every microbatch."""
        if self.microbatches == 1:
            return True
        return self.zero == 3 or self.ep > 1 or self.reduce_every == "microbatch"

    @property
    def dp_microbatches(self) -> list[int]:
        """The number of microbatches of each dp rank. With `dp_speeds`: by speed, `microbatches` on average."""
        if self.dp_speeds is None or self.equal_microbatches:
            return [self.microbatches] * self.dp
        return shares_by_speed(self.dp * self.microbatches, self.dp_speeds)

    @property
    def dp_samples(self) -> list[int]:
        """The number of samples of each dp rank in a step.

        With `dp_speeds`, faster ranks run more microbatches of the same size or, if all ranks must run the same number of
        microbatches, larger ones.
        """
        if self.dp_speeds is None or not self.equal_microbatches:
            return [m * (self.batch_size // (self.dp * self.microbatches)) for m in self.dp_microbatches]
        shares = shares_by_speed(self.batch_size // self.microbatches, self.dp_speeds)
        return [self.microbatches * share for share in shares]

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def require_local_ranks(self) -> None:
        """Raise ValueError if this machine would have to start more ranks than a local pool has."""
        if self.world_size > MAX_RANKS and not under_torchrun():
            raise ValueError(
                f"{self.mesh_name} makes {self.world_size} ranks on one machine; use at most {MAX_RANKS}, or torchrun"
            )

    @property
    def mesh_sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def mixed_precision(self) -> bool:
        """True if the model computes in half precision and the optimizer updates float32 master weights."""
        return self.dtype in ("bfloat16", "float16")

    @property
    def torch_master_dtype(self) -> torch.dtype:
        """The dtype of the weights that the optimizer updates; by default, gradients are reduced in it, too."""
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
        """The mesh's name: the axes with more than one rank (dp2-tp2) and tp's layout (tp4-2d); dp1 for one process."""
        axes = [f"{axis}{n}" for axis, n in self.mesh_sizes.items() if n > 1] or ["dp1"]
        layout: TensorLayout = self.choice("tp_layout")
        return "-".join(axes) + layout.mesh_suffix(self)


def schedule_of(config: TrainConfig, dp_rank: int = 0) -> Schedule:
    """Return the schedule of a dp rank's pipeline. With `dp_speeds`, dp ranks may run different numbers of microbatches."""
    arguments = tuple(sorted(config.choice("schedule").arguments(config).items()))
    microbatches = config.dp_microbatches[dp_rank]
    return _schedule(config.schedule, config.pp, microbatches, config.chunks, arguments)


@lru_cache(maxsize=16)  # a search over meshes asks for the same schedule once per mesh
def _schedule(
    name: str, p: int, m: int, chunks: int | None, arguments: tuple[tuple[str, Any], ...]
) -> Schedule:
    return make_schedule(name, p, m, chunks, **dict(arguments))


def _complete_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of every choice that has any. Missing options get defaults; a dict becomes its options class."""
    given, complete = dict(config.options), {}
    for field_name in CHOSEN:
        cls = config.choice(field_name).options
        own = given.pop(field_name, {})
        if cls is not None:
            complete[field_name] = own if isinstance(own, cls) else make_options(cls, field_name, own)
        elif own:
            names = ", ".join(
                f"{field_name}.{name}" for name in (own if isinstance(own, dict) else vars(own))
            )
            chosen = getattr(config, field_name)
            raise ValueError(
                f"{names}: {field_name}={chosen} has no options; leave it out, or choose another"
            )
    if given:
        raise ValueError(f"options={sorted(given)}: nothing is chosen by these; use {one_of(CHOSEN)}")
    return complete


# The default model of `minipar verify`: small, but with the hard cases (grouped queries, dropout, tied embeddings).
SMALL = ModelConfig(
    dim=32, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=64, dropout=0.1, tie_embeddings=True
)
VERIFY_DEFAULTS = TrainConfig(
    model=SMALL, steps=5, batch_size=8, seq_len=64, warmup=2, dtype="float64", timeout_s=30
)
