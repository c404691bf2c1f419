"""Training programs whose runs were published, with fitted numbers where these predict runs held out better."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from minipar.cost.layout import Implementation


class Program(NamedTuple):
    """A training program: `implementation` is its behaviour, `words` a description."""

    implementation: Implementation
    words: str


PROGRAMS = {
    "minipar": Program(Implementation(), "ours, with the default numbers: it has not run on so many GPUs"),
    "megatron-2021": Program(
        Implementation("dense", False, sequence_parallel=False, bucket_mb=inf, arithmetic=0.93),
        "Megatron-LM in 2021: stored scores, no sequence parallelism, gradients after the backward",
    ),
    "deepspeed-2021": Program(
        Implementation("dense", sequence_parallel=False, reduce_every="microbatch"),
        "DeepSpeed's ZeRO-3 in 2021, which gathered tensor by tensor and waited for it: up to three times slower than this",
    ),
    "fsdp-2023": Program(
        Implementation("dense", reduce_every="microbatch", bucket_layers=True),
        "PyTorch's first FSDP, without a fused attention",
    ),
    "composer": Program(
        Implementation(reduce_every="microbatch", bucket_layers=True, arithmetic=0.87, attention_speed=0.5),
        "MosaicML's Composer on FSDP, with Triton's flash attention",
    ),
    "megatron-core": Program(
        Implementation(
            "cudnn", overlap_params=True, reduce_every="microbatch", fused=True, partial=("acts",), fold_experts=True,
            once_per_rank=True, overlap_tp=True,
        ),
        "Megatron Core from 2023 on: tp's messages overlapped, its experts spread over tp, too",
    ),
    "automodel": Program(
        Implementation("cudnn", overlap_params=True, fused=True, once_per_rank=True),
        "NeMo AutoModel on FSDP2, with Transformer Engine and DeepEP",
    ),
    "torchtitan": Program(
        Implementation(reduce_every="microbatch", bucket_layers=True, fused=True, partial=("ops",)),
        "torchtitan on FSDP2, compiled",
    ),
    "torchtitan-eager": Program(
        Implementation(reduce_every="microbatch", bucket_layers=True, partial=("ops",), arithmetic=1.42),
        "the same, not compiled",
    ),
    "kempnerforge": Program(
        Implementation("cudnn", reduce_every="microbatch", bucket_layers=True, fused=True, arithmetic=0.81),
        "KempnerForge, a small trainer on FSDP2 and DTensor, compiled",
    ),
    "kempnerforge-eager": Program(
        Implementation("cudnn", reduce_every="microbatch", bucket_layers=True), "the same, not compiled"
    ),
    "llama-3": Program(Implementation(overlap_params=True, fused=True), "Meta's trainer of Llama 3"),
}  # fmt: skip
