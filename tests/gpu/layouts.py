"""The strategies to try on a number of ranks: each alone, and together."""

from __future__ import annotations

from dataclasses import replace

from minipar.config.train_config import SMALL, TrainConfig
from minipar.runtime.devices import Machine, why_not_nccl

EXPERTS = replace(SMALL, num_experts=8, top_k=2, group_tokens=8, tie_embeddings=False)
MOST_RANKS = 8


def layouts(ranks: int) -> dict[str, TrainConfig]:
    """Every strategy on so many ranks, by name: those that this number allows."""
    half = dict(dp=ranks // 2)
    options = {
        "DDP": dict(dp=ranks),
        "ZeRO-1": dict(dp=ranks, zero=1),
        "ZeRO-2": dict(dp=ranks, zero=2),
        "FSDP": dict(dp=ranks, zero=3),
        "HSDP": dict(dp=ranks, zero=3, replicate=2),
        "TP": dict(tp=ranks),
        "TP, sequence parallel": dict(tp=ranks, sequence_parallel=True),
        "TP, chunked": dict(tp=ranks, sequence_parallel=True, tp_chunked=True),
        "PP, 1F1B": dict(pp=ranks, microbatches=4),
        "PP, zero bubble": dict(pp=ranks, microbatches=4, schedule="zb-h1"),
        "CP, ring": dict(cp=ranks),
        "CP, Ulysses": dict(cp=ranks, cp_attention="ulysses"),
        "CP, all-gather": dict(cp=ranks, cp_attention="all_gather"),
        "EP": dict(dp=ranks, ep=ranks, model=EXPERTS),
        "LAMB": dict(dp=ranks, zero=1, optimizer="lamb"),
        "native collectives": dict(dp=ranks, zero=1, algorithm="native"),
        "recomputation, offload": dict(dp=ranks, recompute="full", offload_activations=True),
        "DDP x TP": dict(half, tp=2),
        "ZeRO-1 x PP": dict(half, pp=2, zero=1, microbatches=2),
        "FSDP x CP": dict(half, cp=2, zero=3),
        "DDP x PP x TP": dict(dp=ranks // 4, pp=2, tp=2, microbatches=2),
    }
    found = {}
    for name, sizes in options.items():
        try:
            config = TrainConfig(
                **{"model": SMALL, "batch_size": 8, "seq_len": 64, "warmup": 2, "steps": 3, **sizes}
            )
        except ValueError:  # not on so many ranks
            continue
        if config.world_size == ranks:
            found[name] = config
    return found


def worlds(machine: Machine) -> list[int]:
    """The numbers of ranks to try with NCCL on this machine: 1, 2, 4 and 8, as far as it can serve them."""
    return [ranks for ranks in (1, 2, 4, MOST_RANKS) if why_not_nccl(ranks, machine) is None]
