"""Numbers that widely read tutorials state about memory, traffic and time: each computed, and found right or wrong."""

from dataclasses import replace

import pytest

from minipar.cost.activations import gpt_layer_bytes
from minipar.cost.layout import Implementation, Job, Layout
from minipar.cost.machines import GIGABIT, MACHINES
from minipar.cost.memory import model_state_bytes, worst_rank_memory
from minipar.cost.model_table import MODELS, gpt
from minipar.cost.models import hardware_flops_per_token, model_flops_per_token
from minipar.cost.stages import idle_s, live_chunks
from minipar.cost.traffic import cp_layer_bytes, dispatch_bytes, gradients_bytes, step_traffic

GB = 1e9
H100 = MACHINES["h100"]


def states_gb(billions: float, ranks: int) -> list[float]:
    """GB of model states per rank, of data parallelism and of ZeRO-1, -2 and -3."""
    return [model_state_bytes(billions * GB, ranks, zero) / GB for zero in range(4)]


@pytest.mark.parametrize(
    ("ranks", "times"), [(8, [2.9, 4.3, 8]), (64, [3.8, 7.2, 64]), (10**6, [4, 8, 10**6])]
)
def test_savings_of_4_and_8_times_are_limits(ranks, times):
    """Stated as 4x, 8x and Nx: right for many ranks, 2.9x and 4.3x on one node."""
    plain, *cut = states_gb(7, ranks)
    assert [plain / one for one in cut] == pytest.approx(times, rel=0.02)


def test_zero_sends_as_much_as_dp_and_stage_3_half_as_much_more():
    job = Job(MODELS["llama-70b"], H100, 64, 4096, 64)
    sent = [gradients_bytes(job, Layout(dp=64, zero=zero), 0)[0] for zero in range(4)]
    assert sent[0] == sent[1] == sent[2]
    assert sent[3] / sent[0] == pytest.approx(1.5, rel=0.01)


def test_70b_on_64_cards_of_80_gb_with_tp8_pp2_dp4():
    """Stated as a working layout. States 70 GB and activations 16 make 86; ZeRO-1 makes it 31 + 16."""
    job = Job(MODELS["llama-70b"], MACHINES["a100-80gb"], 64, 4096, 1024)
    kept = worst_rank_memory(job, Layout(dp=4, pp=2, tp=8))[1]["activations"] / GB
    assert kept == pytest.approx(16.4, abs=0.1)
    states = [model_state_bytes(70e9 / 16, 4, zero) / GB for zero in (0, 1)]
    assert states == pytest.approx([70, 30.6], abs=0.1)
    assert states[0] + kept > 80 > states[1] + kept
    recomputed = 80 * gpt_layer_bytes(4096, 1, 8192, 64, 8, True, "full") + kept * GB / 80
    assert recomputed / GB == pytest.approx(0.86, abs=0.02)


def test_7b_does_not_train_on_one_card():
    """Stated: one card. 112 GB of states; on 8 cards ZeRO-1 suffices."""
    plain, zero1, *_ = states_gb(7, 8)
    assert plain == 112 > 80 > zero1


def test_tensor_parallelisms_bytes():
    """Stated as four all-reduces of 2 b s h. Of b s h elements each: 8 b s h (t-1)/t elements sent, twice that in bytes."""
    shape = replace(gpt("x", 48, 6144, 48), dropout=False)
    plain = Implementation(sequence_parallel=False)
    more, fewer = (
        Job(replace(shape, num_layers=layers), H100, 8, 2048, 1, implementation=plain) for layers in (48, 47)
    )
    layer = step_traffic(more, Layout(tp=8), 0)["tp"].total - step_traffic(fewer, Layout(tp=8), 0)["tp"].total
    assert layer == pytest.approx(16 * 2048 * 6144 * 7 / 8)


def test_nvlink_against_infiniband():
    """Stated as 900 GB/s against 200 Gb/s: both directions against one, bytes against bits. 18 times; 9 of 400 Gb/s."""
    assert H100.link_bytes_per_s / (200 * GIGABIT) == 18
    assert H100.link_bytes_per_s / H100.card_bytes_per_s == 9


def test_the_bubble_of_four_stages_and_one_microbatch():
    """Stated as (P-1)/M = 75 %. (P-1)/M is 3, of the ideal time; 75 % is of the time taken."""
    idle, work = idle_s("1f1b", 4, 1, 1, 1), 3
    assert idle / work == 3
    assert idle / (idle + work) == 0.75


def test_full_recomputation_costs_a_third_and_keeps_a_hundredth():
    """Stated as 33 % more compute for 60 % less memory, and 20 to 30 % for 60 to 80 %."""
    gpt3 = [gpt_layer_bytes(2048, 1, 12288, 96, recompute=how) for how in ("none", "selective", "full")]
    seven = [gpt_layer_bytes(4096, 1, 4096, 32, recompute=how) for how in ("none", "selective", "full")]
    assert [kept / gpt3[0] for kept in gpt3[1:]] == pytest.approx([0.30, 0.018], abs=0.003)
    assert [kept / seven[0] for kept in seven[1:]] == pytest.approx([0.175, 0.0103], abs=0.001)
    assert seven[2] / seven[1] == pytest.approx(
        0.059, abs=0.001
    )  # beside flash attention, which stores no scores
    flops = [
        hardware_flops_per_token(MODELS["gpt3-175b"], 2048, how) for how in ("none", "selective", "full")
    ]
    assert flops[0] == model_flops_per_token(MODELS["gpt3-175b"], 2048)
    # A forward of the core: a third of s/(6 h), the paper's 2.7 %, which counts its backward again, too.
    assert flops[1] / flops[0] - 1 == pytest.approx(2048 / (6 * 12288) / 3, rel=0.05)
    assert flops[2] / flops[0] - 1 == pytest.approx(1 / 3, abs=0.002)


def test_10b_on_cards_of_32_gb():
    """Stated: with ZeRO it trains. With stage 1 on no number of cards; with 2 from 12, with 3 from 6."""
    fits = {zero: [n for n in range(1, 20) if states_gb(10, n)[zero] < 32] for zero in (1, 2, 3)}
    assert states_gb(10, 10**9)[1] > 32
    assert (fits[1], fits[2][0], fits[3][0]) == ([], 12, 6)


def test_70b_on_100_cards_of_40_gb_needs_no_offload():
    assert states_gb(70, 100)[3] == pytest.approx(11.2)


def test_keys_and_values_of_ten_thousand_tokens():
    """Stated as 5 GB for Llama 2 7B, 1.25 in four bits: right."""
    shape = MODELS["llama-7b"]
    a_token = 2 * shape.num_layers * shape.kv_dim * 2
    assert a_token == 524288
    assert 10_000 * a_token / GB == pytest.approx(5.24, abs=0.01)
    assert 10_000 * a_token / 4 / GB == pytest.approx(1.31, abs=0.01)


@pytest.mark.parametrize("v", [2, 4])
def test_interleaving_divides_the_bubble_and_costs_activations(v):
    """Stated by some to be best in both; others, with the formula, are right."""
    p, m = 8, 64
    assert idle_s("interleaved", p, 1, 1, 1, v) == idle_s("1f1b", p, 1, 1, 1) / v
    kept = live_chunks("interleaved", 0, p, m, v) / (v * live_chunks("1f1b", 0, p, m))
    assert kept == pytest.approx(1 + (p - 1) / (p * v))


@pytest.mark.parametrize(("bytes_per_s", "tokens"), [(300e9, 1040), (100 * GIGABIT, 24960)])
def test_blocks_that_hide_a_ring_of_keys(bytes_per_s, tokens):
    """arXiv:2310.01889, table 2: a block of F/B tokens. 4 d c^2 FLOPs hide 4 c d bytes."""
    assert MACHINES["a100-80gb"].peak_flops / bytes_per_s == tokens


@pytest.mark.parametrize(("warm_up", "times"), [(0.15, 4.92), (0.25, 3.37)])
def test_1_bit_adam_sends_a_fifth_and_not_a_26th(warm_up, times):
    """Stated as 26 times less: 5, since the first 15 % of the steps send whole gradients, and at most 16 after them."""
    assert 1 / (warm_up + (1 - warm_up) / 16) == pytest.approx(times, abs=0.01)


def test_half_of_the_peak_is_hfu():
    """Stated as an MFU of 50 to 55 %: Megatron's 52 % has the recomputation in it; of the model's own work it is 39 %."""
    shape = gpt("1T", 128, 25600, 160)
    model, done = model_flops_per_token(shape, 2048), hardware_flops_per_token(shape, 2048, "full")
    assert pytest.approx(0.52, abs=0.005) == 163 / 312
    assert 163 / 312 * model / done == pytest.approx(0.392, abs=0.002)


@pytest.mark.parametrize(("bits", "saved"), [(8, 0.5), (4, 0.75), (2, 0.875)])
def test_quantised_keys_and_values(bits, saved):
    """Stated as 50 to 75 % for 4 and 2 bits, which is for 8 and 4."""
    assert 1 - bits / 16 == saved


def test_capacity_counts_every_choice():
    """Stated as T/E x factor: of top-2 it is twice that, and so are the bytes sent."""
    shape = MODELS["mixtral-8x7b"]
    one, two = (
        dispatch_bytes(Job(replace(shape, top_k=k), H100, 8, 4096, 8), Layout(dp=8, ep=8)) for k in (1, 2)
    )
    assert two == 2 * one == 2 * 4096 * shape.dim * 2


def test_ring_memory_divides_by_cp_and_traffic_does_not():
    """Stated as attention's memory divided by the degree: right of a block of keys and values; bytes sent hardly change."""
    job = Job(MODELS["llama-7b"], H100, 64, 65536, 64)
    blocks = [layout.tokens(job) * 2 * job.shape.kv_dim for layout in (Layout(cp=2), Layout(cp=8))]
    assert blocks[0] == 4 * blocks[1] == 65536 * job.shape.kv_dim
    sent = [cp_layer_bytes(job, Layout(cp=cp))[0] for cp in (2, 8)]
    assert sent[1] / sent[0] == (7 / 8) / (1 / 2)


def test_zero_bubble_has_one():
    """Stated as almost no bubble: 7 % of the paper's 6.2B with ZB-H2, none in a V where all three are equally long."""
    p, m, f, i, w, message = 8, 24, 29.718, 29.444, 19.927, 0.527
    idle = idle_s("zb-h2", p, f, i, w) + 2 * (p - 1) * message
    assert idle / (m * (f + i + w) + idle) == pytest.approx(0.0698, abs=1e-4)
    assert idle_s("zb-v", p, 1, 1, 1) == idle_s("zb-h2", p, 1, 1, 1) == 0
