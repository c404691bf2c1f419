"""Options of training programs that the cost model prices by a size known from their source or from a measured kernel."""

from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest

from minipar.cost.layout import Implementation, Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS
from minipar.cost.models import expert_elems, layer_matmul_elems
from minipar.cost.timing import dispatch_s
from minipar.cost.work import core_seconds, layer_seconds, partly_again_seconds


def job(machine="h100", model="qwen3-30b", **options) -> Job:
    return Job(MODELS[model], MACHINES[machine], 64, 4096, 64, "mixed-fp32-grads", Implementation(**options))


@pytest.mark.parametrize(
    ("machine", "model", "times"),
    [("h100", "qwen3-30b", 518 / 319), ("h200", "gpt-oss-120b", 363 / 284), ("b200", "qwen3-30b", 1)],
)
def test_cudnns_attention_is_as_much_faster_as_was_measured(machine, model, times):
    usual, fast = (core_seconds(job(machine, model, cudnn=cudnn), 4096, 1) for cudnn in (False, True))
    assert usual / fast == pytest.approx(times)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.0)])
def test_rates_of_cudnns_kernel_are_two_numbers_above_0(speeds):
    with pytest.raises(ValueError, match="cudnn_speeds=.*; use two numbers above 0"):
        replace(MACHINES["h100"], cudnn_speeds=speeds)


@pytest.mark.parametrize("ep", [1, 8])
def test_a_product_that_adds_gradients_reads_and_writes_them(ep):
    """The 4 bytes of each weight that the rank holds, in place of writing 2."""
    usual, adds = (layer_seconds(job(adds_gradients=adds), 4096, 1, True, ep) for adds in (False, True))
    shape, machine = MODELS["qwen3-30b"], MACHINES["h100"]
    held = layer_matmul_elems(shape, 0) + (shape.num_experts / ep - shape.top_k) * expert_elems(shape)
    seconds = held * (4 + 4 - 2) / (machine.hbm_bytes_per_s * machine.share / Implementation().arithmetic)
    assert adds[:2] == usual[:2]
    assert adds.weight_gradient - usual.weight_gradient == pytest.approx(seconds)


def test_partial_recomputation_adds_no_gradients():
    for recompute in ("acts", "ops"):
        usual, adds = (
            partly_again_seconds(job(adds_gradients=adds), recompute, 4096, 1, True, 8)
            for adds in (False, True)
        )
        assert usual == pytest.approx(adds)


def messages_s(layout: str, **options) -> float:
    """The time of an all-to-all without its latency, which no option changes."""
    found = job(**options)
    quick = replace(found.machine, link_latency_s=0, network_latency_s=0, start_latency_s=0)
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
    once = {"once_per_rank": True, "once_per_node": True, "adjacent_experts": True}
    away = messages_s("dp64-ep64", **once) / messages_s("dp64-ep64", once_per_rank=True, once_per_node=True)
    assert away == pytest.approx(1 / (8 * (1 - (1 - 1 / 8) ** 8)))
