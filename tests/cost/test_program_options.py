"""Options of training programs that the cost model prices by a size known from their source or from a measured kernel."""

from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest

from minipar.cost.layout import Implementation, Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS
from minipar.cost.models import expert_elems
from minipar.cost.timing import dispatch_s
from minipar.cost.work import SLOW_ROWS, core_seconds, layer_seconds


def job(machine="h100", model="qwen3-30b", **options) -> Job:
    return Job(MODELS[model], MACHINES[machine], 64, 4096, 64, "mixed-fp32-grads", Implementation(**options))


@pytest.mark.parametrize(
    ("machine", "model", "times"),
    [("h100", "qwen3-30b", 518 / 319), ("h200", "gpt-oss-120b", 363 / 284), ("b200", "qwen3-30b", 1)],
)
def test_cudnns_attention_is_as_much_faster_as_was_measured(machine, model, times):
    usual, fast = (core_seconds(job(machine, model, attention=how), 4096, 1) for how in ("flash", "cudnn"))
    assert usual / fast == pytest.approx(times)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.0)])
def test_rates_of_cudnns_kernel_are_two_numbers_above_0(speeds):
    with pytest.raises(ValueError, match="cudnn_speeds=.*; use two numbers above 0"):
        replace(MACHINES["h100"], cudnn_speeds=speeds)


@pytest.mark.parametrize("ep", [1, 8])
def test_experts_with_few_rows_are_slow_to_multiply(ep):
    """With SLOW_ROWS rows each, products of experts take twice the time of their FLOPs."""
    found = job()
    endless = replace(found, machine=replace(found.machine, hbm_bytes_per_s=1e30))
    shape, machine = found.shape, found.machine
    tokens = SLOW_ROWS * shape.num_experts / (shape.top_k * ep)
    rate = machine.peak_flops * machine.matmul_fraction * machine.share / found.implementation.arithmetic
    experts_s = 2 * shape.top_k * expert_elems(shape) * tokens / rate
    once, twice = (layer_seconds(endless, n * tokens, 1, True, ep).weight_gradient for n in (1, 2))
    assert 2 * once - twice == pytest.approx(experts_s)


def messages_s(layout: str, node: int = 64, **options) -> float:
    """The time of an all-to-all inside nodes of so many GPUs, without its latency, which no option changes."""
    found = job(**options)
    quick = replace(
        found.machine, link_latency_s=0, network_latency_s=0, start_latency_s=0, gpus_per_node=node
    )
    return dispatch_s(replace(found, machine=quick), parse_layout(layout))


def test_a_token_goes_once_to_each_rank_that_has_its_experts():
    """The mean number of ranks, counted over all choices of 8 of them out of 4."""
    ranks = fmean(len(set(chosen)) for chosen in product(range(4), repeat=8))
    once, usual = messages_s("dp64-ep4", once_per_rank=True), messages_s("dp64-ep4")
    assert once / usual == pytest.approx(ranks / 8)


@pytest.mark.parametrize(("ep", "ranks"), [(4, 1), (8, 1), (32, 2), (64, 4)])
def test_neighbouring_experts_are_on_few_ranks(ep, ranks):
    """8 neighbours of 128 experts, of which a rank has 128 / ep: counted for tokens that begin at multiples of 8."""
    per_rank = 128 // ep
    assert fmean(len({e // per_rank for e in range(8 * i, 8 * i + 8)}) for i in range(16)) == ranks
    once = {"once_per_rank": True, "adjacent_experts": True}
    assert messages_s(f"dp64-ep{ep}", **once) / messages_s(f"dp64-ep{ep}") == pytest.approx(ranks / 8)


def test_of_neighbouring_experts_one_node_gets_a_token():
    once = {"once_per_rank": True, "adjacent_experts": True}
    away = messages_s("dp64-ep64", 8, **once) / messages_s("dp64-ep64", 8, once_per_rank=True)
    assert away == pytest.approx(1 / (8 * (1 - (1 - 1 / 8) ** 8)))
