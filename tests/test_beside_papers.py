"""The figures of docs/extras.md, "Beside the papers", are computed here as the page says."""

import math
import random
from fractions import Fraction
from pathlib import Path

from minipar.config.train_config import TrainConfig, schedule_of
from minipar.context import document_cost, share_documents
from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS
from minipar.extras.cost.choices import UnequalOptions
from minipar.extras.cost.unequal import by_speed, equal_parts, replicas_of
from minipar.extras.experts.expert_balance import balanced, rank_loads
from minipar.extras.schedules.offloaded import offloaded

PAGE = (Path(__file__).parent.parent / "docs" / "extras.md").read_text(encoding="utf-8")


def says(*parts: str) -> bool:
    """Whether one row of the table has all of these parts."""
    return any(all(part in line for part in parts) for line in PAGE.splitlines())


def test_gathers_of_a_stage():
    config = TrainConfig(
        pp=2, dp=2, zero=3, microbatches=4, batch_size=8, schedule="breadth-first", gather_every="stage"
    )
    once, every = len(schedule_of(config).visits(0)), 2 * config.microbatches * 2  # 2 stages a rank
    halves_of_a_stage = Fraction(every + 2, once + 2)  # one more each for its gradients
    assert says(
        "breadth-first", f"{once} gathers instead of {every}", f"{float(halves_of_a_stage):.1f} times"
    )


def test_parts_of_activations_in_cpu_memory():
    shares = {limit: len(offloaded(8, 32, "1f1b", limit).offloaded) / (8 * 32) for limit in (4, 1)}
    assert says("offloaded", f"limit 4: {shares[4]:.0%}", f"limit 1: {shares[1]:.0%}")


def busiest(loads: list[int], experts, ep: int) -> float:
    of_ranks = rank_loads(loads, experts, ep)
    return max(of_ranks) / (sum(of_ranks) / ep)


def test_loads_of_ranks_before_and_after_experts_move():
    loads = [round(1e6 / (k + 1)) for k in range(64)]
    random.Random(0).shuffle(loads)
    before = tuple(range(64))
    after = balanced(loads, before, 8)
    hottest = max(loads) / (sum(loads) / 8)
    assert says(
        "balance",
        f"{busiest(loads, before, 8):.2f} times the mean to {busiest(loads, after, 8):.2f}",
        f"alone has {hottest:.2f}",
    )


def test_steps_on_gpus_of_two_kinds():
    job = Job(MODELS["llama-7b"], MACHINES["a100-80gb"], 16, 2048, 512)
    gains = []
    for speed in (0.7, 0.6):
        replicas = replicas_of(job, parse_layout("dp16-zero1-mb1-full"), UnequalOptions(8, speed=speed))
        gains.append(f"{equal_parts(replicas).step_s / by_speed(replicas).step_s:.2f}")
    assert says("dp-speeds", f"{gains[0]} to {gains[1]} times")


def test_costs_of_documents_on_ranks():
    draw = random.Random(0)
    lengths = [round(math.exp(draw.uniform(math.log(1024), math.log(131072)))) for _ in range(64)]
    shape, each = MODELS["llama-7b"], -(-sum(lengths) // 8)
    costs, room, rank = [0.0] * 8, each, 0
    for length in lengths:  # in order, cut where a rank has its tokens
        while length:
            part = min(length, room)
            costs[rank] += document_cost(shape, part)
            length, room = length - part, room - part
            if not room:
                rank, room = rank + 1, each
    of_documents = [document_cost(shape, length) for length in lengths]
    dealt = [sum(of_documents[i] for i in own) for own in share_documents(of_documents, [1.0] * 8)]
    before, after = (max(c) / (sum(c) / 8) for c in (costs, dealt))
    assert says("share_documents", f"{before:.2f} times the mean", f"{after:.2f}")
