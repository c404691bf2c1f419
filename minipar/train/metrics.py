"""Metrics of a step besides its loss: floating point operations per second, and the routing of the experts."""

from __future__ import annotations

import torch

from minipar.model import ModelConfig, take_metrics


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Floating point operations of training per token: forward and backward, without recomputation.

        6 * (weights that multiply a token) + 12 * num_layers * dim * seq_len

    A weight does one multiplication and one addition in the forward, and two of each in the backward. The second term is
    the attention scores and the weighted sum of values, with no discount for the causal mask, as is usual. The head
    counts; the embedding, a table, does not; of the experts, only those that the token reaches.
    Source: PaLM, arXiv:2204.02311, appendix B.
    """
    attention = 2 * model.dim * (model.dim + model.num_kv_heads * model.head_dim)
    dense = 3 * model.dim * model.hidden_dim
    with_experts = model.num_layers // model.moe_every if model.num_experts else 0
    sparse = model.top_k * dense + model.dim * model.num_experts + 3 * model.dim * model.shared_dim
    layers = model.num_layers * attention + (model.num_layers - with_experts) * dense + with_experts * sparse
    weights = layers + model.dim * model.vocab_size
    return 6 * weights + 12 * model.num_layers * model.dim * seq_len


def recomputed_flops_per_token(model: ModelConfig, seq_len: int, recompute: str) -> float:
    """Floating point operations per token of a recomputation: one more forward of what it repeats, never of the head."""
    core = 4 * model.num_layers * model.dim * seq_len
    layers = flops_per_token(model, seq_len) / 3 - 2 * model.dim * model.vocab_size
    return {"none": 0.0, "selective": core}.get(recompute, layers)


def speed(config, seconds: float) -> dict[str, float]:
    """Tokens per second of all ranks; useful TFLOP/s of one rank; of `config.peak_tflops`, these (mfu) and all done (hfu).

    hfu counts the operations of a recomputation, too: at most 4/3 of mfu.
    """
    tokens_per_s = config.batch_size * config.seq_len / seconds
    useful = flops_per_token(config.model, config.seq_len)
    done = useful + recomputed_flops_per_token(config.model, config.seq_len, config.recompute)
    tflops = tokens_per_s * useful / config.world_size / 1e12
    mfu = tflops / config.peak_tflops if config.peak_tflops else None
    fractions = {} if mfu is None else {"mfu": mfu, "hfu": mfu * done / useful}
    return {"seconds": seconds, "tokens_per_s": tokens_per_s, "tflops": tflops, **fractions}


def routing(world, state, config) -> dict[str, float]:
    """Routing metrics of the step's batch, means over the layers with experts; equal on every rank. Empty without experts.

    balance_loss    coefficient * E * sum f_i P_i: equal to the coefficient where choices are even
    z_loss          of the router's logits
    drop_rate       the fraction of choices that exceeded an expert's capacity
    unserved        the fraction of tokens that reached no expert at all
    imbalance       the busiest expert's load over the mean load
    router_entropy  of the router's distribution, nats per token

    All-reduces the load and six numbers of each layer over the ranks that have it, then seven numbers over all ranks.
    """
    if not config.model.num_experts:
        return {}
    comm, sums = state.mesh.sharing("dp", "cp"), torch.zeros(7, dtype=torch.float64, device=world.device)
    for stage in state.stages:
        for metrics in take_metrics(stage).values():
            load = comm.all_reduce(metrics.load)
            choices = load.sum()
            tokens = comm.all_reduce(torch.full((1,), metrics.tokens, device=world.device))
            # How often each token was counted: twice where recomputation ran the forward again.
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
