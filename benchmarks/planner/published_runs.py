"""Published training runs, and the error of the cost model on each.

`published_runs.csv` has one run per line: its table, model, GPUs, tokens per sample, samples per step, layout, and the
published rate. TABLES says for each table which program ran on which machine, the unit of the rate, and the source.

Half of the runs are held out: no parameter was fitted to them. A run is held out if the first byte of the SHA-256 of its
line without the rate is odd; no other split was tried. But the *form* of the model (a sum of operations and bytes, messages
that overlap in part, a program's own speed of attention) was found by looking at errors of all runs, so errors on new
programs will be larger.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from minipar.cost.layout import Implementation, Job, Layout, parse_layout
from minipar.cost.machines import MACHINES, Machine
from minipar.cost.model_table import find_model, gpt
from minipar.cost.models import ModelShape, hardware_flops_per_token, model_flops_per_token
from minipar.cost.programs import PROGRAMS
from minipar.cost.timing import StepTime, step_time

MIXTURE = "mixture"


class Table(NamedTuple):
    """A published table.

    program  a key of PROGRAMS
    unit     unit of the rates, per GPU and second: "tokens", "hardware" TFLOPs (with recomputation) or "model" TFLOPs
    ddp      True: runs without a pipeline reduce gradients during the backward, runs with a pipeline after it
    copies   models whose rows go to a node or rank once for each of their experts there, whatever the program can do:
             NCCL's all-to-all was used in place of DeepEP's
    adjacent the router gives each token neighbouring experts
    """

    program: str
    machine: Machine
    unit: str
    source: str
    precision: str = "mixed"
    ddp: bool = False
    copies: tuple[str, ...] = ()
    adjacent: bool = False


_A100, _H100 = MACHINES["a100-80gb"], MACHINES["h100"]
_H100_HBM2 = replace(_H100, hbm_bytes_per_s=2.4e12, memory_bytes=96e9)
_H200_OF_4 = replace(MACHINES["h200"], gpus_per_node=4, cards_per_node=4)
_BRIDGE = "Megatron-Bridge 067f987, docs/performance-summary-archive.md,"
_OSS = ("gpt-oss-120b",)
_RECIPES = "Megatron-LM, branch dev, examples/moe_recipes/qwen3_30b"
_FOUNDRY = "llm-foundry 8c8dd48, scripts/train/benchmarking/README.md"
TABLES = {
    "megatron-table-1": Table(
        "megatron-2021", _A100, "hardware", "arXiv:2104.04473, table 1; microbatches from its artifact", ddp=True
    ),
    "megatron-table-2": Table("megatron-2021", _A100, "hardware", "arXiv:2104.04473, table 2, PTD parallelism"),
    "megatron-table-2-zero-3": Table("deepspeed-2021", _A100, "hardware", "arXiv:2104.04473, table 2, ZeRO-3"),
    "megatron-readme": Table("megatron-2021", _A100, "hardware", "Megatron-LM, README of April 2021"),
    "fsdp": Table(
        "fsdp-2023", replace(_A100, card_bytes_per_s=2e12 / 8 / 8), "hardware", "arXiv:2304.11277, section 5.4"
    ),
    "llama-3": Table("llama-3", _H100, "model", "arXiv:2407.21783, table 4", "mixed-fp32-grads"),
    "torchtitan": Table(
        "torchtitan", _H100_HBM2, "tokens",
        "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06: bfloat16, without async TP", "mixed-fp32-grads",
    ),
    "moe-zoo": Table(
        "megatron-core", _H100, "tokens",
        "Megatron-MoE-ModelZoo e865051, best_practice/qwen3, H100, DeepEP, without overlapped all-to-alls",
        "mixed-fp32-grads",
    ),
    "moe-zoo-a2a": Table(
        "megatron-core", _H100, "tokens",
        "Megatron-MoE-ModelZoo e865051, best_practice/qwen3, H100, A2A; a third chunk there holds embedding and loss",
        "mixed-fp32-grads", copies=("qwen3-235b",),
    ),
    "moe-zoo-mixtral": Table(
        "megatron-core", _H100, "tokens",
        "Megatron-MoE-ModelZoo e865051, best_practice/mixtral, forced balance: about 465 of Megatron's TFLOPS",
        "mixed-fp32-grads", copies=("mixtral-8x22b",),
    ),
    "moe-zoo-gb200": Table(
        "megatron-core", MACHINES["gb200"], "tokens",
        "Megatron-MoE-ModelZoo e865051, best_practice/qwen3, GB200, BF16: 750 of Megatron's TFLOPS", "mixed-fp32-grads",
    ),
    "moe-recipes-h100": Table(
        "megatron-core", _H100, "tokens", f"{_RECIPES}, H100, BF16: 234.1 of Megatron's TFLOPS", "mixed-fp32-grads"
    ),
    "moe-recipes-gb200": Table(
        "megatron-core", MACHINES["gb200"], "tokens", f"{_RECIPES}, GB200, BF16: 528.0 of Megatron's TFLOPS",
        "mixed-fp32-grads",
    ),
    "xtuner": Table(
        "megatron-core", MACHINES["h800"], "tokens",
        "xtuner b934f46, docs/en/benchmark/megatron_moe_benchmark.md, experts in one node, forced balance; a third chunk "
        "there holds embedding and loss, and the cards of a DGX H100 are assumed", "mixed-fp32-grads",
        copies=("qwen3-235b",),
    ),
    "bridge-h100": Table("megatron-core", _H100, "tokens", f"{_BRIDGE} 25.11 and 26.04.01, BF16", copies=_OSS),
    "bridge-b200": Table(
        "megatron-core", MACHINES["b200"], "tokens", f"{_BRIDGE} 25.11, 26.02 and 26.04.01, BF16", copies=_OSS
    ),
    "bridge-b300": Table(
        "megatron-core", replace(MACHINES["b200"], memory_bytes=270e9, card_bytes_per_s=800e9 / 8), "tokens",
        f"{_BRIDGE} 26.02 and 26.04.01, BF16", copies=_OSS,
    ),
    "bridge-gb200": Table(
        "megatron-core", MACHINES["gb200"], "tokens", f"{_BRIDGE} 25.11 and 26.02, BF16", copies=_OSS
    ),
    "bridge-gb300": Table(
        "megatron-core", replace(MACHINES["gb200"], memory_bytes=279e9), "tokens", f"{_BRIDGE} 25.11 and 26.04.01, BF16",
        copies=_OSS,
    ),
    "automodel": Table(
        "automodel", _H100, "tokens",
        "NeMo Automodel 8d9bfb9, docs/performance-summary.md and examples/benchmark/configs, BF16; its FakeBalancedGate "
        "gives tokens neighbouring experts", "mixed-fp32-grads", adjacent=True,
    ),
    "torchtitan-2024": Table(
        "torchtitan", _H100_HBM2, "tokens", "torchtitan b5bcd76, benchmarks/llama3_h100_202412, tables 1 and 3, compiled",
        "mixed-fp32-grads",
    ),
    "torchtitan-qwen3": Table(
        "torchtitan", _H100_HBM2, "tokens", "github.com/pytorch/torchtitan/pull/1690, compiled", "mixed-fp32-grads"
    ),
    "torchtitan-b200": Table(
        "torchtitan", MACHINES["b200"], "tokens", "github.com/mlc-ai/pith-train/issues/79, TorchTitan", "mixed-fp32-grads"
    ),
    "titan-eager-2024": Table(
        "torchtitan-eager", _H100_HBM2, "tokens", "torchtitan b5bcd76, benchmarks/llama3_h100_202412, not compiled",
        "mixed-fp32-grads",
    ),
    "titan-eager-qwen3": Table(
        "torchtitan-eager", _H100_HBM2, "tokens", "github.com/pytorch/torchtitan/pull/1690, not compiled",
        "mixed-fp32-grads",
    ),
    "kempner": Table(
        "kempnerforge", _H200_OF_4, "tokens",
        "KempnerForge 5666d0d, benchmarks/mfu_scaling and config_validation, compiled; a card of 400 Gb/s for each GPU is "
        "assumed", "mixed-fp32-grads",
    ),
    "kempner-eager": Table(
        "kempnerforge-eager", _H200_OF_4, "tokens", "KempnerForge 5666d0d, benchmarks/mfu_scaling, not compiled",
        "mixed-fp32-grads",
    ),
    "kempner-mixture": Table(
        "kempnerforge-eager", _H200_OF_4, "tokens",
        "KempnerForge 5666d0d, benchmarks/moe_packed, packed experts, not compiled (moe_packed_bench.sh)",
        "mixed-fp32-grads",
    ),
    "mpt-h100": Table("composer", _H100, "tokens", f"{_FOUNDRY}, H100 80GB BF16", "mixed-fp32-grads"),
    "mpt-a100-80gb": Table("composer", _A100, "tokens", f"{_FOUNDRY}, A100 80GB"),
    "mpt-a100-40gb": Table("composer", MACHINES["a100-40gb"], "tokens", f"{_FOUNDRY}, A100 40GB"),
}  # fmt: skip


class Run(NamedTuple):
    """A published run. `rate` is per GPU and second, in the unit of its table."""

    table: str
    model: str
    gpus: int
    seq_len: int
    batch: int
    layout: Layout
    rate: float

    @property
    def held_out(self) -> bool:
        key = f"{self.table},{self.model},{self.gpus},{self.seq_len},{self.batch},{self.layout.name}"
        return bool(hashlib.sha256(key.encode()).digest()[0] % 2)

    @property
    def kind(self) -> str:
        """The kind of run, by which errors are summarized: "mixture", "ZeRO-3" or "tp, pp or data parallel"."""
        if self.job().shape.num_experts:
            return MIXTURE
        return "ZeRO-3" if self.layout.zero == 3 and self.layout.cp == 1 else "tp, pp or data parallel"

    @property
    def mfu(self) -> float:
        """The measured model FLOPs utilization, as a fraction."""
        job, unit = self.job(), TABLES[self.table].unit
        model = model_flops_per_token(job.shape, self.seq_len)
        if unit == "tokens":
            return self.rate * model / job.machine.peak_flops
        done = hardware_flops_per_token(job.shape, self.seq_len, self.layout.recompute)
        return 1e12 * self.rate / job.machine.peak_flops * (model / done if unit == "hardware" else 1)

    @property
    def per_second(self) -> float:
        """Steps per second, as measured."""
        job = self.job()
        per_step = model_flops_per_token(job.shape, self.seq_len) * self.batch * self.seq_len
        return self.mfu * self.gpus * job.machine.peak_flops / per_step

    def job(self, how: Implementation | None = None) -> Job:
        """Return the run as a job of its own program, or of the implementation `how`."""
        table = TABLES[self.table]
        how = how or PROGRAMS[table.program].implementation
        if table.ddp:
            how = replace(how, overlap_gradients=self.layout.pp == 1)
        if self.model in table.copies:
            how = replace(how, once_per_rank=False)
        if table.adjacent:
            how = replace(how, adjacent_experts=True)
        shape = _shape(self.model, self.seq_len)
        return Job(shape, table.machine, self.gpus, self.seq_len, self.batch, table.precision, how)

    def error(self, how: Implementation | None = None) -> float:
        """Return ln(predicted time / measured time): at 0.1, the prediction is about 10 % too slow."""
        job = self.job(how)
        return math.log(self.rate / _rate(job, step_time(job, self.layout), TABLES[self.table].unit))


@cache
def published_runs() -> tuple[Run, ...]:
    text = (files(__package__) / "published_runs.csv").read_text(encoding="utf-8")
    return tuple(
        Run(
            row["table"], row["model"], int(row["gpus"]), int(row["seq"]), int(row["batch"]),
            parse_layout(row["layout"]), float(row["rate"]),
        )
        for row in csv.DictReader(text.splitlines())
    )  # fmt: skip


def _rate(job: Job, step: StepTime, unit: str) -> float:
    if unit == "tokens":
        return job.batch * job.seq_len / (step.total * job.gpus)
    return (step.hfu if unit == "hardware" else step.mfu) * job.machine.peak_flops / 1e12


@cache
def _shape(model: str, seq_len: int) -> ModelShape:
    """Return the shape of a model: a known name or, with its sizes, "gpt", "mpt", "llama" or "moe"."""
    kind, *words = model.split()
    sizes = tuple(map(int, words))
    if kind == "gpt":  # layers, width, heads, vocabulary unless it is GPT-2's
        return gpt("gpt", *sizes)
    if kind == "mpt":  # layers, width, heads: GPT-2's layer without dropout
        layers, dim, heads = sizes
        return ModelShape(
            "mpt", layers, dim, heads, 4 * dim, 50368, gated=False, bias=True, norm_params=2, positions=seq_len,
            tie_embeddings=True,
        )  # fmt: skip
    if kind in (
        "llama",
        "moe",
    ):  # layers, width, heads, key/value heads, the MLP's width, vocabulary, experts, top-k
        layers, dim, heads, kv_heads, width, vocab, num_experts, top_k = (*sizes, 0, 1)[:8]
        return ModelShape(
            kind,
            layers,
            dim,
            heads,
            width,
            vocab,
            kv_heads,
            num_experts=num_experts,
            top_k=top_k,
            capacity_factor=1.0,
        )
    return find_model(model)


def spread(errors: Iterable[float], share: float = 0.8) -> float:
    """Return the smallest w such that one more error like these lies within [-w, w] with a probability of `share`.

    Each of n + 1 errors is equally likely to be the k-th smallest, so w is the ceil(share (n + 1))-th smallest of n.
    Raises ValueError if there are too few errors: for a share of 0.8, fewer than four.
    Source: split conformal prediction, arXiv:2107.07511, section 1 and appendix D.
    """
    sizes = sorted(map(abs, errors))
    at = math.ceil(round(share * (len(sizes) + 1), 9))
    if at > len(sizes):
        raise ValueError(
            f"{len(sizes)} errors do not tell where {share:.0%} of all lie; use {math.ceil(round(share / (1 - share), 9))}"
        )
    return sizes[at - 1]
