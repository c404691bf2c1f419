"""What answers of the book state and no lesson shows, computed."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.distributed import all_reduce, distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch.utils.flop_counter import FlopCounterMode

import minipar
from minipar import SwitchMoE
from minipar.config.model_config import ModelConfig
from minipar.context import context_parallel
from minipar.cost.activations import gpt_layer_bytes
from minipar.cost.collectives import sent_share
from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.traffic import critical_tokens_per_gpu
from minipar.extras.precision.block_scales import MX_BLOCK, NVFP4_BLOCK, round_mx, round_nvfp4
from minipar.extras.precision.formats import FORMATS
from minipar.extras.precision.fp8_linear import round_blocks_to_fp8
from minipar.model import Transformer, flash
from minipar.tensor_parallel import tensor_parallel


def test_hybrid_sharding_sends_two_thirds_of_full_per_card():
    """Eight rings through eight cards: each card carries the messages of one eighth of the parameters."""
    full = 3 * sent_share("all_gather", 512) / 8
    hybrid = sent_share("all_reduce", 64) / 8
    assert full / hybrid == pytest.approx(1.5, rel=0.02)
    a_rank = 3 * sent_share(
        "all_gather", 512
    )  # all that a rank sends, most of it to neighbours inside the node
    assert a_rank / hybrid == pytest.approx(12, rel=0.02)


def test_eight_cards_hide_gradients_behind_1000_tokens_not_8000():
    assert critical_tokens_per_gpu(4096, 400e12, 8 * 50e9) == pytest.approx(1000, rel=1e-3)
    assert critical_tokens_per_gpu(4096, 400e12, 50e9) == pytest.approx(8000, rel=1e-3)


def test_states_of_70b_with_tp8_pp2_dp4_and_16_gb_of_activations():
    job = Job(MODELS["llama-70b"], MACHINES["a100-80gb"], 64, 4096, 1024)
    plain, zero1 = (worst_rank_memory(job, parse_layout(f"dp4-pp2-tp8-zero{zero}"))[1] for zero in (0, 1))
    assert round(plain["activations"] / 1e9) == round(zero1["activations"] / 1e9) == 16
    assert sum(plain.values()) > 80e9 > 50e9 > sum(zero1.values())
    recomputed = worst_rank_memory(job, parse_layout("dp4-pp2-tp8-zero0-full"))[1]
    assert round(sum(recomputed.values()) / 1e9) == 72


def test_a_sampler_gives_rank_r_every_nth_entry_of_one_permutation():
    data = list(range(24))
    samplers = [DistributedSampler(data, num_replicas=4, rank=rank, seed=1) for rank in range(4)]
    parts = [list(sampler) for sampler in samplers]
    assert sorted(sum(parts, [])) == data
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    assert parts == [order[rank::4] for rank in range(4)]
    assert list(samplers[0]) == parts[0]  # without set_epoch every epoch has the same order
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != parts[0]


def test_gradients_of_old_weights_allow_half_the_rate():
    """On a slope of curvature 1 gradient descent is stable below a rate of 2, with weights one step old below 1."""

    def ends(rate, delay):
        weights = [1.0] * (delay + 1)
        for _ in range(400):
            weights.append(weights[-1] - rate * weights[-1 - delay])
        return abs(weights[-1])

    assert ends(1.9, 0) < 1e-9 < 1e9 < ends(2.1, 0)
    assert ends(0.9, 1) < 1e-6 < 1e6 < ends(1.1, 1)


def test_a_switch_that_adds_halves_an_all_reduce():
    """The last of four ranks stands for the switch: bytes and messages that each other rank sends, by a ring and to it."""
    p, n = 3, 48 * 4

    def both(world):
        x = torch.arange(48.0) + world.rank
        ranks = world.subgroup(range(p), "without the switch") if world.rank < p else None
        world.traffic.reset()
        if ranks is None:
            total = sum(world.recv(x.shape, x.dtype, rank) for rank in range(p))
            for rank in range(p):
                world.send(total, rank)
            return None
        by_ring = ranks.all_reduce(x, algorithm="ring")
        ring = world.traffic.sent_bytes, world.traffic.messages
        world.traffic.reset()
        world.send(x, p)
        assert torch.equal(world.recv(x.shape, x.dtype, p), by_ring)
        return ring, (world.traffic.sent_bytes, world.traffic.messages)

    ring, switch = (2 * (p - 1) * n // p, 2 * (p - 1)), (n, 1)
    assert minipar.run(both, world_size=p + 1) == [(ring, switch)] * p + [None]
    assert [sent_share("all_reduce", p) for p in (8, 1024)] == [1.75, 2 - 2 / 1024]  # up to twice as much


def test_in_switch_sums_gain_no_bandwidth_on_half_an_all_reduce():
    """Of the vector, out of and into a rank. Its own chunk stays where it is."""
    for p in (8, 64):
        reduce_scatter, all_gather = ((p - 1) / p, 1 / p), (1 / p, (p - 1) / p)
        for alone, name in ((reduce_scatter, "reduce_scatter"), (all_gather, "all_gather")):
            assert max(alone) == sent_share(name, p)  # the busier direction carries what a ring's does
        together = [sum(directions) for directions in zip(reduce_scatter, all_gather)]
        assert together == [1.0, 1.0]


def test_each_way_of_cutting_a_sequence_splits_heads_or_queries():
    """On each of 4 ranks, of 16 tokens and 8 heads: tokens between blocks; heads, queries and keys of a kernel's call."""

    def seen_by(world, way):
        calls, between = set(), []

        def forward_(out, lse, q, k, *rest):
            calls.add((q.shape[1], q.shape[2], k.shape[2]))
            flash.forward_(out, lse, q, k, *rest)

        kernel = flash.AttentionKernel(forward_, flash.backward_)
        model = Transformer(ModelConfig(vocab_size=8, dim=32, num_layers=1, num_heads=8, max_seq_len=16))
        (block,) = model.layers.values()
        tokens = torch.arange(16)[None] % 8
        if way == "sequence parallelism":
            tensor_parallel(model, world, sequence_parallel=True)
            block.attention.overrides.core = partial(flash.flash_attention, impl=kernel)
        else:
            context_parallel(model, world, attention=way, impl=kernel, layout="contiguous")
            tokens = tokens.chunk(4, dim=1)[world.rank]
        block.attention_norm.register_forward_pre_hook(lambda _, inputs: between.append(inputs[0].shape[1]))
        with torch.no_grad():
            model(tokens)
        return between[0], calls

    ways = ("sequence parallelism", "ring", "all_gather", "ulysses")
    assert {way: minipar.run(seen_by, way, world_size=4)[2] for way in ways} == {
        "sequence parallelism": (4, {(2, 16, 16)}),
        "ring": (4, {(8, 4, 4)}),
        "all_gather": (4, {(8, 4, 16)}),
        "ulysses": (4, {(2, 16, 16)}),
    }


def test_a_ring_of_8_key_heads_sends_under_half_of_ulysses():
    """Heads times tokens, as parts of N times the width of a head: 128 query heads, 8 of keys and values, 8 ranks."""
    queries, keys, p = 128, 8, 8
    ring = (p - 1) * 2 * keys / p
    ulysses = (p - 1) / p * 2 * (queries + keys) / p
    assert ring == 14
    assert ring < 0.5 * ulysses == 14.875


def test_recomputing_half_keeps_53_percent_for_a_sixth_more():
    tokens, width = 4096, 8192
    with_flash_attention, inputs = (
        gpt_layer_bytes(tokens, 1, width, 64, recompute=how) / (tokens * width)
        for how in ("selective", "full")
    )
    kept = (with_flash_attention + inputs) / 2
    assert (kept, round(kept / with_flash_attention, 2)) == (18, 0.53)
    forward, backward = 1, 2
    assert (forward / 2) / (forward + backward) == pytest.approx(1 / 6)


def test_fp8_halves_activations_and_leaves_most_of_the_states():
    assert [torch.finfo(dtype).bits // 8 for dtype in (torch.bfloat16, torch.float8_e4m3fn)] == [2, 1]
    masters_and_moments, weight_and_gradient = 12, 2 + 2
    assert (masters_and_moments + 1 + 2) / (masters_and_moments + weight_and_gradient) == 15 / 16


def test_replicas_that_differ_in_one_bit_have_other_checksums():
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    replicas = [weights.clone() for _ in range(4)]
    replicas[2].view(torch.int32)[17] ^= 1 << 3
    sums = [replica.view(torch.int32).sum().item() for replica in replicas]
    odd = [rank for rank, total in enumerate(sums) if sums.count(total) == 1]
    assert odd == [2]


def test_the_flight_recorder_shows_a_late_rank_and_a_mismatch():
    minipar.shutdown()  # the recorder keeps the last entries alone, and other tests' ranks may have filled it

    def records(world):
        group = world.process_group()
        known = len(json.loads(_dump_fr_trace_json(True, False)).get("entries", []))
        all_reduce(torch.ones(4), group=group)
        all_reduce(torch.ones(4) if world.rank == 0 else torch.ones(2, 2), group=group)
        late = all_reduce(torch.ones(4), group=group, async_op=True) if world.rank == 0 else None
        entries = json.loads(_dump_fr_trace_json(True, False))["entries"][known:]
        world.barrier()
        late = late or all_reduce(torch.ones(4), group=group, async_op=True)
        late.wait()
        return [(e["collective_seq_id"], e["profiling_name"], e["input_sizes"]) for e in entries]

    by_rank = minipar.run(records, world_size=2)
    behind = min((0, 1), key=lambda rank: by_rank[rank][-1][0])
    assert behind == 1
    differing = [i for i, (a, b) in enumerate(zip(*by_rank)) if a != b]
    assert differing == [1]
    assert [entries[1][2] for entries in by_rank] == [[[4]], [[2, 2]]]


def test_outer_copies_of_diloco_make_16_bytes_24():
    inner, outer = (
        2 + 2 + 4 + 4 + 4,
        4 + 4,
    )  # the weights of the last agreement, and the momentum of the outer step
    assert inner + outer == 24


def test_eight_experts_have_8_times_the_weights_at_equal_flops():
    x, positions, sample_ids = torch.randn(1, 64, 16), torch.arange(64), torch.arange(1)

    def size_and_flops(num_experts):
        moe = SwitchMoE(16, 32, num_experts, capacity_factor=None)
        counts = []
        for part in (lambda: moe(x), lambda: moe.router(x, positions, sample_ids)):
            with FlopCounterMode(display=False) as counter:
                part()
            counts.append(counter.get_total_flops())
        return sum(p.numel() for p in moe.experts.parameters()), counts[0] - counts[1]

    (one, flops_of_one), (eight, flops_of_eight) = size_and_flops(1), size_and_flops(8)
    assert (eight / one, flops_of_eight / flops_of_one) == (8, 1)


def test_70b_on_2_trillion_tokens_take_512_h100_48_days():
    seconds = 6 * 70e9 * 2e12 / (0.4 * MACHINES["h100"].peak_flops * 512)
    assert round(seconds / 86400) == 48


def test_bf16_loses_an_addend_of_a_256th_and_float32_does_not():
    for dtype, want in ((torch.bfloat16, 256.0), (torch.float32, 257.0)):
        assert (torch.tensor(256.0, dtype=dtype) + torch.tensor(1.0, dtype=dtype)).item() == want


def test_offloaded_states_of_7b_cross_pcie_in_about_a_second_a_step():
    gradients_down_and_weights_up = 2 + 2  # bytes a parameter
    assert round(gradients_down_and_weights_up * 7e9 / 25e9, 1) == 1.1


def test_torch_names_a_group_by_how_many_a_process_has_made():
    first, second = (distributed_c10d._process_group_name([0, 1], use_hashed_name=False) for _ in range(2))
    assert int(second) == int(first) + 1
    by_members = {distributed_c10d._process_group_name([0, 1], use_hashed_name=True) for _ in range(2)}
    assert len(by_members) == 1


def test_an_all_to_all_sends_a_pth_of_what_an_all_gather_sends():
    def sent(world, collective):
        getattr(world, collective)(torch.ones(64))
        return world.traffic.sent_bytes, world.traffic.messages

    p, n = 4, 64 * 4
    assert minipar.run(sent, "all_to_all", world_size=p) == [((p - 1) * n // p, p - 1)] * p
    assert [num_bytes for num_bytes, _ in minipar.run(sent, "all_gather", world_size=p)] == [(p - 1) * n] * p


def test_no_sync_has_to_enclose_the_forward_too():
    """How often torch's DDP reduces in four microbatches: without no_sync, with it around backwards, around both."""

    def reductions(world, around):
        torch.manual_seed(0)
        group = world.process_group()
        ddp = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
        reduced = []

        def hook(state, bucket):
            reduced.append(bucket.index())
            return allreduce_hook(group, bucket)

        ddp.register_comm_hook(None, hook)
        for microbatch in range(4):
            x = torch.full((1, 3), float(world.rank + microbatch))
            inside = around if microbatch < 3 else None
            if inside == "both":
                with ddp.no_sync():
                    ddp(x).sum().backward()
            elif inside == "backward":
                loss = ddp(x).sum()
                with ddp.no_sync():
                    loss.backward()
            else:
                ddp(x).sum().backward()
        return len(reduced), ddp.module.weight.grad.tolist()

    results = [minipar.run(reductions, how, world_size=2) for how in (None, "backward", "both")]
    assert tuple(counted for counted, _ in (on_ranks[0] for on_ranks in results)) == (4, 4, 1)
    mean_of_sums = (0 + 1 + 2 + 3 + 1 + 2 + 3 + 4) / 2
    assert all(grad == [[mean_of_sums] * 3] for on_ranks in results for _, grad in on_ranks)


def test_gathering_in_8_bits_saves_a_third():
    """Bytes a parameter of a microbatch of FSDP: weights gathered twice, gradients in 16 bits reduce-scattered once."""

    def step(world, shards, eight_bits):
        shard, p = shards[world.rank], world.size
        largest = world.all_reduce(shard.abs().max().float(), op="max")
        world.traffic.reset()
        if eight_bits:
            shard = (shard * (448 / largest)).to(torch.float8_e4m3fn).view(torch.uint8)
        for _ in range(2):
            whole = world.all_gather(shard)
        world.reduce_scatter(torch.ones(whole.numel(), dtype=torch.bfloat16))
        return whole, world.traffic.sent_bytes / (whole.numel() * (p - 1) / p)

    weights = torch.randn(256, generator=torch.Generator().manual_seed(0)).bfloat16()
    of_16, of_8 = (minipar.run(step, weights.chunk(4), how, world_size=4) for how in (False, True))
    assert [a_parameter for _, a_parameter in of_16] == [6] * 4
    assert [a_parameter for _, a_parameter in of_8] == [4] * 4
    assert of_8[0][1] / of_16[0][1] == 4 / 6
    # The largest magnitude over all shards gives each shard the scale of the whole tensor.
    at_once = (weights * (448 / weights.abs().max().float())).to(torch.float8_e4m3fn).view(torch.uint8)
    assert all(torch.equal(whole, at_once) for whole, _ in of_8)


def test_smaller_blocks_lose_less_and_a_transpose_rounds_anew():
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w[5, 7] = 100.0  # an outlier

    def bits(elements, block, scale_bits=8):
        exponent_bits = {"e4m3": 4, "e2m1": 2}[elements]
        element_bits = 1 + exponent_bits + FORMATS[elements].mantissa_bits
        return element_bits + scale_bits / block

    formats = {  # MXFP8, MXFP4, NVFP4
        "mxfp8": (("e4m3", MX_BLOCK), partial(round_mx, elements="e4m3")),
        "mxfp4": (("e2m1", MX_BLOCK), partial(round_mx, elements="e2m1")),
        "nvfp4": (("e2m1", NVFP4_BLOCK), round_nvfp4),
    }
    assert [bits(*stored) for stored, _ in formats.values()] == [8.25, 4.25, 4.5]
    for _, rounded in formats.values():
        assert torch.equal(rounded(w[:, :32]), rounded(w)[:, :32])  # blocks run along the last dim
        assert not torch.equal(rounded(w.T).T, rounded(w))
    square = partial(round_blocks_to_fp8, kind="e4m3", rows=16, columns=16)
    assert torch.equal(square(w.T).T, square(w))

    def error(of_format):
        return (formats[of_format][1](w) - w).abs().mean()

    assert error("nvfp4") < error("mxfp4")


def test_another_order_of_addition_swaps_near_ties():
    """Two logits, each of 256 terms, added in one run or in eight: a kernel picks the number of runs by the batch."""
    draw = torch.Generator().manual_seed(0)
    terms = torch.randn(256, 5000, generator=draw, dtype=torch.float64)
    others = terms.flip(0)
    others[0] += 1e-6  # a near tie: the second is larger
    pair = torch.stack((terms, others), dim=1)  # [256, 2, 5000]

    def added(x):
        total = x[0]
        for term in x[1:]:
            total = total + term
        return total

    def swapped(dtype):
        in_one = added(pair.to(dtype))
        in_eight = added(torch.stack([added(part) for part in pair.to(dtype).chunk(8)]))
        return (in_one.argmax(0) != in_eight.argmax(0)).sum().item()

    assert swapped(torch.float32) > 0 == swapped(torch.float64)
