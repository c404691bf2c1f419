"""Metrics of a step besides its loss: floating point operations per second, and the routing of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.cost.models import ModelShape, hardware_flops_per_token, model_flops_per_token
from minipar.model import take_metrics

if TYPE_CHECKING:
    from minipar.train.parallelize import RankState


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Return the floating point operations per token of forward and backward, without recomputation.

        6 * (weights that multiply a token) + 12 * num_layers * num_heads * head_dim * seq_len
        with latent attention                 + 6 * num_layers * num_heads * (2 head_dim + rope_dim) * seq_len

    A weight does one multiplication and one addition in the forward, and two of each in the backward. The second term is
    for the attention scores and the weighted sum of values; as usual, masked scores count too. The head counts; the
    embedding, which is a table, does not; of the experts, only those that the token uses count.
    Source: PaLM, arXiv:2204.02311, appendix B.
    """
    return model_flops_per_token(ModelShape.of(model), seq_len)


def speed(config: TrainConfig, seconds: float) -> dict[str, float]:
    """Return tokens per second of all ranks, useful TFLOP/s per rank and, if `config.peak_tflops` is known, MFU and HFU.

    MFU counts the useful operations. HFU also counts recomputed operations; it is at most 4/3 of MFU.
    """
    tokens_per_s = config.batch_size * config.seq_len / seconds
    useful = flops_per_token(config.model, config.seq_len)
    done = hardware_flops_per_token(ModelShape.of(config.model), config.seq_len, config.recompute)
    tflops = tokens_per_s * useful / config.world_size / 1e12
    mfu = tflops / config.peak_tflops if config.peak_tflops else None
    fractions = {} if mfu is None else {"mfu": mfu, "hfu": mfu * (done / useful)}
    return {"seconds": seconds, "tokens_per_s": tokens_per_s, "tflops": tflops, **fractions}


def routing(world: Comm, state: RankState, config: TrainConfig) -> dict[str, float]:
    """Return the routing metrics of the batch, averaged over the layers with experts, the same on every rank.

    {} if no layer has experts.

    balance_loss    coefficient * E * sum f_i P_i: equal to the coefficient if choices are even
    z_loss          the router's z-loss
    drop_rate       the fraction of choices that exceeded an expert's capacity
    unserved        the fraction of tokens that reached no expert at all
    imbalance       the busiest expert's load over the mean load
    router_entropy  entropy of the router's distribution, in nats per token

    All-reduces each layer's load and six more numbers over the ranks that have the layer, then seven numbers over all
    ranks.
    """
    if not config.model.num_experts:
        return {}
    comm, sums = state.mesh.comm("dp", "cp"), torch.zeros(7, dtype=torch.float64, device=world.device)
    for stage in state.stages:
        for metrics in take_metrics(stage).values():
            load = comm.all_reduce(metrics.load)
            choices = load.sum()
            tokens = comm.all_reduce(torch.full((1,), metrics.tokens, device=world.device))
            # How often each token was counted: twice if recomputation ran the forward again.
            times = tokens / (config.batch_size * config.seq_len)
            parts = [
                metrics.balance_loss,
                metrics.z_loss,
                metrics.dropped,
                metrics.unserved,
                metrics.entropy_sum,
            ]
            parts = comm.all_reduce(torch.stack([part.double() for part in parts]))
            shares = parts / torch.cat([times, times, choices[None], tokens, tokens])
            sums += torch.cat([shares, (load.max() * len(load) / choices)[None], sums.new_ones(1)])
    sums = world.all_reduce(sums)
    names = ("balance_loss", "z_loss", "drop_rate", "unserved", "router_entropy", "imbalance")
    return dict(zip(names, (sums[:-1] / sums[-1]).tolist()))
