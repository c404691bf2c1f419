"""Figures that answers of the interview book quote and that no lesson computes, each from its formula."""

import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minipar.config.model_config import ModelConfig
from minipar.cost.collectives import sent_share
from minipar.cost.links import links_of
from minipar.cost.machines import find_machine
from minipar.cost.model_table import find_model
from minipar.cost.serving import decode_time, most_requests
from minipar.learn.expressions import VALUES
from minipar.learn.facts import tp_layer_bytes
from minipar.model import Transformer
from minipar.schedules import Costs, one_f_one_b, simulate

H100 = find_machine("h100")


def test_square_products_of_886_rows_balance_compute_and_reads():
    balance = H100.peak_flops / H100.hbm_bytes_per_s  # operations a byte
    assert round(balance) == 295

    def intensity(n):
        return 2 * n**3 / (2 * 3 * n**2)  # two operations a product, two bytes an element of three matrices

    assert min(n for n in range(1, 2000) if intensity(n) >= balance) == 886


def test_a_memory_full_of_caches_is_read_longer_than_used():
    shape = find_model("llama3-8b")
    batch = most_requests(shape, H100, 4096)
    step = decode_time(shape, H100, batch=batch, context=4096)
    assert batch == 115
    assert [round(1e3 * seconds) for seconds in (step.reading_s, step.arithmetic_s)] == [23, 2]
    assert step.cache_s > 3 * step.weights_s


def test_losing_16_multiprocessors_slows_264_tiles_by_half():
    def waves(multiprocessors):
        return math.ceil(264 / multiprocessors)

    assert (waves(132), waves(132 - 16)) == (2, 3)


def test_64_does_not_divide_the_heads_of_a_trillion_parameters():
    """Megatron's model of 2021 (arXiv:2104.04473, table 1), which ran with t 8, p 64, d 6 and 512 microbatches."""
    shape, t, p, d = VALUES["TRILLION"], 8, 64, 6
    assert t * p * d == 3072
    assert (shape.num_heads % 64, shape.num_heads % t) == (32, 0)
    assert shape.dim / 64 == 400
    group = links_of(H100, 64, 1)
    assert 1 - group.per_node / 64 == 7 / 8  # of a group are on other nodes
    assert round(100 * (p - 1) / 512) == 12


def test_four_ordinary_losses_make_thirty_percent():
    kernels, bubble, waiting, the_rest = 0.70, 0.15, 0.25, 0.33
    assert round(kernels * (1 - bubble) * (1 - waiting) * (1 - the_rest), 2) == 0.30


def test_a_backward_takes_twice_the_operations_of_a_forward():
    model = Transformer(ModelConfig(dim=64, num_layers=2, num_heads=1, max_seq_len=8), dtype=torch.float32)
    tokens = torch.zeros(4, 8, dtype=torch.long)
    # The embedding copies rows: it multiplies nothing.
    trained = [(name, p) for name, p in model.named_parameters() if "embedding" not in name]
    matrices = sum(p.numel() for _, p in trained if p.dim() == 2)

    def operations(backward):
        with FlopCounterMode(display=False) as counter:
            out = model(tokens)
            if backward:
                out.sum().backward()
        return counter.get_flop_counts()["Global"][torch.ops.aten.mm]

    assert operations(False) == 2 * matrices * tokens.numel()
    assert operations(True) == 6 * matrices * tokens.numel()


def test_the_best_split_between_fsdp_and_tensor_parallelism():
    """Bytes of an MLP in 16 bits, over 512 GPUs: two matrices gathered over x, an activation summed over y.

    Over a step the matrices are gathered again and their gradients reduce-scattered, and the activation's is summed.
    """
    B, D, F, N = 4_000_000, 8192, 28_672, 512

    def best(gathers, sums):
        matrices, activation = 2 * D * F * 2, B * D * 2  # bytes; a sum moves twice as many
        return min(range(1, N + 1), key=lambda x: gathers * matrices * x / N + sums * 2 * activation / x)

    assert best(gathers=1, sums=1) == round(math.sqrt(B * N / F)) == 267
    assert best(gathers=3, sums=2) == 218


def test_beside_tp_a_node_gathers_an_eighth_and_takes_as_long():
    """An all-gather of 70B in 16 bits on 512 GPUs, by FSDP alone or beside tensor parallelism over nodes of eight."""

    def seconds(ranks, stride):
        links = links_of(H100, ranks, stride)
        return sent_share("all_gather", ranks) * (140e9 / stride) / links.between

    assert links_of(H100, 512, 1).between == 8 * links_of(H100, 64, 8).between  # one network card of eight
    assert seconds(64, stride=8) == pytest.approx(seconds(512, stride=1), rel=0.02)


def test_a_stage_a_quarter_slower_costs_16_to_21_percent():
    def slower(m, place):
        times = [1.25 if stage == place else 1.0 for stage in range(8)]
        uneven = simulate(one_f_one_b(8, m), Costs(F=times, I=times, W=times))
        return uneven.makespan / simulate(one_f_one_b(8, m)).makespan - 1

    assert [round(100 * slower(32, place)) for place in (0, 7)] == [16, 21]
    assert all(slower(32, 0) < slower(32, place) < slower(32, 7) for place in range(1, 7))
    assert 0.22 < slower(128, 0) < slower(128, 7) < 0.25


def test_weights_of_70b_leave_a_node_in_a_third_of_a_second():
    num_bytes = 2 * find_model("llama-70b").num_params
    assert round(num_bytes / 1e9) == 138
    assert round(num_bytes / (8 * 50e9), 3) == 0.345


def test_eight_documents_of_1024_are_an_eighth_of_one_of_8192():
    def scores(lengths):
        return sum(n**2 for n in lengths)

    assert scores([8192]) / scores([1024] * 8) == 8


def test_a_state_passed_from_rank_to_rank_is_linear_attention():
    """Causal linear attention out_t = q_t sum_{s <= t} k_s^T v_s, in four parts that hand on a d x d state."""
    q, k, v = torch.randn(3, 32, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = (q @ k.T).tril() @ v
    state, parts = torch.zeros(5, 5, dtype=torch.float64), []
    for a, b, c in zip(q.chunk(4), k.chunk(4), v.chunk(4)):
        parts.append(a @ state + (a @ b.T).tril() @ c)
        state = state + b.T @ c
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    assert state.numel() == 25  # whatever the length


def test_on_a_ring_an_all_to_all_takes_a_quarter_of_an_all_gather():
    """Blocks that cross the busiest of a bidirectional ring's links: p ranks with a vector of p blocks each."""
    p = 64
    crossings = [[0, 0] for _ in range(p)]  # of the link from i to i + 1, and back
    for source in range(p):
        for target in range(p):
            hops = (target - source) % p
            clockwise = hops < p / 2 or (hops == p / 2 and source % 2 == 0)
            for hop in range(hops if clockwise else p - hops):
                link = (source + hop) % p if clockwise else (source - hop - 1) % p
                crossings[link][not clockwise] += 1
    all_to_all = max(max(link) for link in crossings)
    all_gather = p * p / 2  # every rank's p blocks go around, half of them each way
    assert all_to_all / all_gather == pytest.approx(0.25, rel=0.05)


class _Passes(TorchDispatchMode):
    """Counts the tensors that operations read and write."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += sum(isinstance(x, torch.Tensor) for x in (*args, out))
        return out


def test_a_pass_over_memory_each_or_one_for_all():
    x = torch.linspace(-5, 5, 11, dtype=torch.float64)

    def passes(function):
        with _Passes() as counter:
            out = function(x)
        return out, counter.count

    separate, unfused = passes(lambda x: (x + 3).clamp(0, 6) / 6)
    one_kernel, fused = passes(torch.nn.functional.hardsigmoid)
    torch.testing.assert_close(one_kernel, separate)
    assert (unfused, fused) == (6, 2)


def test_a_serial_percent_limits_strong_scaling():
    def speedup(ranks, serial=0.01):
        return 1 / (serial + (1 - serial) / ranks)

    assert round(speedup(64)) == 39
    assert round(speedup(64) / 64, 2) == 0.61


def test_one_in_ten_thousand_late_makes_most_steps_late():
    ranks, late = 10_000, 1e-4
    assert round(1 - (1 - late) ** ranks, 2) == 0.63
    draw = random.Random(0)
    steps = [any(draw.random() < late for _ in range(ranks)) for _ in range(200)]
    assert 0.5 < sum(steps) / 200 < 0.76


def test_one_domain_of_72_gpus_has_18_times_a_network_cards_rate():
    rack = find_machine("gb200")
    assert (rack.gpus_per_node, rack.link_bytes_per_s / rack.card_bytes_per_s) == (72, 18)
    assert round(72 * 1.8) == 130  # terabytes a second, both directions


def test_a_step_in_memory_of_a_neighbour_is_saved_in_a_second():
    """12 bytes a parameter of 70B over 512 ranks, by a network card of 50 GB/s each."""
    per_rank = 12 * 70e9 / 512
    assert round(per_rank / 1e9, 1) == 1.6
    assert round(per_rank / 50e9 * 1e3) == 33


def test_zero_3_sends_like_tp_at_tokens_of_4_and_a_half_widths():
    """Bytes of a rank for a layer of 12 h^2 parameters in 16 bits, over many ranks."""
    width, ranks = 8192, 10**6
    parameters = 2 * 12 * width**2
    zero_3 = (2 * sent_share("all_gather", ranks) + sent_share("reduce_scatter", ranks)) * parameters
    tokens = zero_3 / tp_layer_bytes(width, ranks)
    assert tokens == pytest.approx(4.5 * width)
    assert round(tokens, -3) == 37_000
