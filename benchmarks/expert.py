"""A mixture of experts against a loop with masks, torch's all_to_all_single, and a dense model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import Row, Times, on_cuda, race, row, run, worlds
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.expert import expert_parallel
from minipar.expert.overlapped_all_to_all import AllToAllRoute
from minipar.model import MoE, Transformer, take_metrics
from minipar.model.aux_loss import MoEMetrics
from minipar.model.permute import combine, permute_rows, plan_kept_rows
from minipar.train.data.text import batch_of_step, load_text
from minipar.train.optim import BETAS, learning_rate

NUM_EXPERTS, NUM_TOKENS, DIM, HIDDEN, TOP_K = 8, 4096, 128, 176, 2


def rows(quick: bool = False) -> Iterator[Row]:
    """Race grouped and masked experts, our all-to-all and torch's, a shared expert's overlap; then train briefly."""
    rounds = 5 if quick else 21
    for dim, hidden, top_k in ((64, 88, 2), (DIM, HIDDEN, TOP_K), (DIM, 2 * HIDDEN, 1)):
        times = run(_race_masks, rounds, dim, hidden, top_k, world_size=1)
        bar = 0.7 if (dim, hidden) == (DIM, HIDDEN) else None
        yield row(f"grouped vs masks, D={dim} F={hidden} k={top_k}", times, bar)
    if 4 in worlds():
        for tokens in (1024, 4096):
            name = f"all-to-all of {tokens * TOP_K} rows, 4 ranks"
            yield row(name, run(_race_exchange, rounds, tokens, world_size=4), 1.1)
        yield row("shared expert: overlapped vs not", run(_race_overlap, rounds, world_size=4))
    if not on_cuda():
        yield from _trained(30 if quick else STEPS)


# Experts, grouped and masked ----------------------------------------------------------------------------------------


def _race_masks(world: Comm, rounds: int, dim: int, hidden: int, top_k: int) -> Times:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    moe = MoE(dim, hidden, NUM_EXPERTS, top_k, None, device=world.device)
    x = torch.randn(NUM_TOKENS, dim, requires_grad=True, device=world.device)
    weight, expert = (
        (x.detach() @ torch.randn(dim, NUM_EXPERTS, device=world.device) * 0.1).softmax(-1).topk(top_k)
    )
    layers = [[torch.nn.Parameter(w[e].detach().clone()) for w in moe.experts.parameters()] for e in range(8)]

    def grouped() -> None:
        plan = plan_kept_rows(expert, torch.ones_like(expert, dtype=torch.bool), NUM_EXPERTS)
        out = moe.experts(permute_rows(x, plan), plan.counts.tolist())
        combine(out, weight, plan).sum().backward()

    def masked() -> None:
        y = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(layers):
            for choice in range(top_k):
                mine = expert[:, choice] == e
                rows = x[mine]
                out = F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
                y[mine] += out * weight[mine, choice, None]
        y.sum().backward()

    return race(world, grouped, masked, rounds)


# All-to-all of rows ------------------------------------------------------------------------------------------------


def _race_exchange(world: Comm, rounds: int, tokens: int) -> Times:
    """Race all-to-alls of as many rows as `tokens` tokens per rank send at top-2 with capacity_factor 1."""
    torch.set_num_threads(1)
    n = tokens * TOP_K // world.size
    sizes = [[n] * world.size] * world.size
    route, x = AllToAllRoute(world), torch.randn(n * world.size, DIM, device=world.device)
    world.all_to_all(x, algorithm="native")
    return race(
        world,
        lambda: route.begin(x, sizes, async_op=False),
        lambda: world.all_to_all(x, sizes[0], sizes[0], algorithm="native"),
        rounds,
        calls=4,
    )


def _race_overlap(world: Comm, rounds: int) -> Times:
    torch.set_num_threads(1)
    x = torch.randn(8, 128, DIM, requires_grad=True, device=world.device)
    steps = []
    for overlap in (True, False):
        moe = MoE(DIM, HIDDEN, NUM_EXPERTS, TOP_K, shared_dim=HIDDEN, device=world.device)
        expert_parallel(moe, world.subgroup(range(world.size), f"overlap {overlap}"), overlap)
        steps.append(lambda moe=moe: moe(x)[0].sum().backward())
    return race(world, steps[0], steps[1], rounds)


# Training -----------------------------------------------------------------------------------------------------------

STEPS = 500
DENSE: dict[str, Any] = dict(dim=64, num_layers=2, num_heads=4, max_seq_len=256, hidden_dim=176)
EXPERTS = dict(DENSE, num_experts=8, top_k=2, hidden_dim=88, capacity_factor=1.5)
UNBALANCED = dict(EXPERTS, balance_coef=0.0)


def train(
    options: dict[str, Any], steps: int, batch_size: int = 8, lr: float = 2e-3, seed: int = 0
) -> tuple[list[float], list[MoEMetrics], float]:
    """Train on the default text; return the losses, the first MoE layer's metrics, and the median seconds per step."""
    config, text = ModelConfig(**options), load_text(None)
    model = Transformer(config, seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.1)
    losses, metrics, seconds = [], [], []
    for step in range(steps):
        start_s = time.perf_counter()
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr, warmup=20)
        batch = batch_of_step(text, seed, step, batch_size, config.max_seq_len)
        optimizer.zero_grad()
        loss = model.loss(batch.tokens, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        metrics += list(take_metrics(model).values())[:1]
        seconds.append(time.perf_counter() - start_s)
    return losses, metrics, statistics.median(seconds)


def _trained(steps: int) -> Iterator[Row]:
    """Train with and without a balance loss, and a dense model; losses and drop rates are means of the last 20 steps."""
    torch.set_num_threads(1)
    dense, balanced, unbalanced = (train(options, steps) for options in (DENSE, EXPERTS, UNBALANCED))
    for name, trained in (("with", balanced), ("without", unbalanced)):
        yield Row(
            f"8 experts {name} balance loss vs dense",
            trained[2],
            dense[2],
            trained[2] / dense[2],
            None,
            f"loss {_last(trained[0]):.3f} vs {_last(dense[0]):.3f}; "
            f"dropped {_last([m.drop_rate for m in trained[1]]):.1%}, "
            f"busiest expert {_last([m.imbalance for m in trained[1]]):.1f} of an even load, after {steps} steps",
        )


def _last(values: list[float]) -> float:
    return statistics.mean(values[-20:])
