"""What is sent is what ranks were counted to send; and the links are those that a group really has."""

from dataclasses import replace
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.cost.collectives import collective_s, hierarchical_all_reduce_s, sent_share
from minipar.cost.layout import Implementation, Job, Layout, parse_layout
from minipar.cost.links import LINK_FRACTION, axis_links, latency_and_bytes_s, links_of, send_s
from minipar.cost.links import collective_s as collective_on
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS, gpt
from minipar.cost.timing import step_parts
from minipar.cost.traffic import critical_tokens_per_gpu, gradients_bytes, step_traffic
from minipar.mesh import Mesh, axes_across_nodes
from tests.cost.runs import (
    LATENT,
    MIXTURE,
    PARALLEL,
    QWEN,
    RUN,
    SMALL,
    assert_sends_what_was_predicted,
    job_of,
    sent,
)

H100 = MACHINES["h100"]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    "mesh",
    [
        dict(tp=2),
        dict(tp=2, recompute="full", sequence_parallel=True),
        dict(pp=2, tp=2, microbatches=2, sequence_parallel=True),
        dict(pp=4, microbatches=4),
        dict(pp=2, microbatches=4, schedule="interleaved"),
        dict(pp=2, microbatches=4, schedule="zb-v"),
        dict(cp=2),
        dict(cp=4, model=replace(SMALL, num_kv_heads=4)),
        dict(dp=2, ep=2, model=MIXTURE),
        dict(dp=4, ep=2, model=MIXTURE),
        dict(dp=2, microbatches=2),
        dict(dp=2, zero=1, microbatches=2),
        dict(dp=4, zero=2),
        dict(dp=2, zero=3, microbatches=2),
        dict(pp=2, dp=2, zero=1, microbatches=2),
        dict(pp=2, dp=4, zero=3, replicate=2, microbatches=2),
        dict(tp=2, recompute="every:2"),
        dict(tp=2, recompute="every:2", sequence_parallel=True),
        dict(pp=2, microbatches=4, schedule="dualpipe-v"),
        dict(cp=2, cp_attention="ulysses"),
        dict(cp=4, cp_attention="ulysses"),
        dict(cp=2, cp_attention="all_gather"),
        dict(cp=4, cp_attention="usp", cp_ulysses=2),
        dict(dp=2, ep=2, model=MIXTURE, recompute="full"),
        dict(dp=2, zero=2, microbatches=2, reduce_every="microbatch"),
        dict(dp=4, zero=3, replicate=2),
        dict(dp=2, zero=3, recompute="every:2"),
        dict(tp=2, model=PARALLEL),
        dict(tp=2, model=PARALLEL, recompute="full", sequence_parallel=True),
        dict(tp=2, model=PARALLEL, recompute="full"),
        dict(tp=2, model=replace(PARALLEL, dropout=0.1), recompute="every:2", sequence_parallel=True),
        dict(tp=2, model=replace(MIXTURE, parallel_block=True, moe_every=2), sequence_parallel=True),
        dict(tp=2, model=LATENT),
        dict(tp=2, model=QWEN, microbatches=2),
        dict(tp=2, model=QWEN, recompute="full", sequence_parallel=True),
        dict(cp=2, model=QWEN, cp_attention="ulysses"),
        dict(dp=2, model=QWEN, zero=3, microbatches=2),
        dict(tp=2, model=LATENT, recompute="full", sequence_parallel=True),
        dict(cp=2, model=LATENT),
        dict(cp=2, model=LATENT, cp_attention="ulysses"),
        dict(dp=2, model=LATENT, zero=3, microbatches=2),
        dict(dp=2, ep=2, tp=2, model=MIXTURE, sequence_parallel=True),
    ],
    ids=lambda mesh: str({k: v for k, v in mesh.items() if k != "model"}) + (
        " in parallel blocks" if "model" in mesh and mesh["model"].parallel_block else ""
    ) + (" with norms of heads" if "model" in mesh and mesh["model"].qk_norm else ""
    ) + (" with latents" if "model" in mesh and mesh["model"].kv_latent_dim else ""
    ),
)  # fmt: skip
def test_ranks_send_what_was_predicted(mesh):
    """Activations to the byte; gradients but for padding (64 bytes a tensor and rank) and flags; the loss to 2 numbers."""
    assert_sends_what_was_predicted(replace(RUN, **mesh, bucket_mb=25))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [
        (dict(zero=0), 4), (dict(zero=1), 4), (dict(zero=2), 4), (dict(zero=3), 4),
        (dict(zero=1, reduce_dtype="bfloat16"), 2), (dict(zero=1, dtype="float32"), 4),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_sent_in_the_bytes_in_which_they_are_summed(options, num_bytes):
    """bfloat16 gradients are summed in float32 unless the run says otherwise; weights are gathered in bfloat16."""
    config = replace(RUN, dtype="bfloat16", dp=2, bucket_mb=25)
    config = replace(config, **options)
    assert job_of(config)[0].reduced_bytes == num_bytes
    assert_sends_what_was_predicted(config)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("order", "microbatches", "tied"),
    [
        ("gpipe", 4, False), ("zb-v", 4, False), ("1f1b", 2, False), ("interleaved", 4, False), ("1f1b", 2, True),
        ("gpipe", 4, True), ("zb-v", 4, True),
    ],
)  # fmt: skip
def test_zero_3_gathers_its_roots_under_pipelines_to_the_byte(order, microbatches, tied):
    """A width of 128 needs no padding; flags of used parameters, an even number of bytes a stage, are all-reduced once.

    Tied embeddings are whole on both end stages, which exchange their gradients over pp.
    """
    model = replace(SMALL, dim=128, tie_embeddings=tied)
    config = replace(RUN, model=model, pp=2, dp=2, zero=3, schedule=order, microbatches=microbatches)
    job, layout = job_of(config)
    for pp, counted, num_tensors in minipar.run(sent, config, world_size=4):
        predicted = step_traffic(job, layout, pp)
        assert counted["pp"] == predicted["pp"].total
        assert 0 <= counted["dp"] - predicted["dp"].total - num_tensors <= layout.chunks


def test_tied_gradients_are_summed_over_shards_and_over_copies():
    """Of V D elements each rank sends 2 (s-1)/s over its s shards, and then 2 (r-1)/r over its r copies."""
    model = replace(SMALL, tie_embeddings=True)
    job, layout = job_of(replace(RUN, model=model, pp=2, dp=4, zero=3, replicate=2, microbatches=2))
    untied = replace(job, shape=replace(job.shape, tie_embeddings=False))
    table, roots = 256 * 64, 2 * 2  # gathers of a root in a step: twice a microbatch
    more = [step_traffic(j, layout, 0)["dp"].total for j in (job, untied)]
    assert more[0] - more[1] == 8 * table * (2 * 1 / 2 + 2 * 1 / 2 - (1 + roots) / 2 - 2 * 1 / 2 / 2)


@pytest.mark.parametrize(("schedule", "both_ends"), [("1f1b", False), ("zb-v", True)])
def test_the_exchange_of_tied_gradients_takes_time(schedule, both_ends):
    slow = replace(H100, card_bytes_per_s=1e6)
    tied = gpt("x", 16, 512, 8)
    layout = Layout(pp=8, tp=8, schedule=schedule, chunks=2 if both_ends else 1)
    found = [
        step_parts(Job(shape, slow, 64, 512, 64), layout)["gradients"]
        for shape in (tied, replace(tied, tie_embeddings=False))
    ]
    table = 2 * 51200 * 512 / 8
    assert found[0] - found[1] == pytest.approx(0 if both_ends else table / (LINK_FRACTION * 1e6), rel=0.01)


# Nodes ----------------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([1, 2]),
)  # fmt: skip
def test_members_per_node_are_those_of_the_mesh(pp, dp, cp, tp, ep):
    ep = gcd(ep, dp * cp)
    layout = Layout(dp=dp, pp=pp, cp=cp, ep=ep, tp=tp)
    mesh = Mesh(layout.world_size, pp=pp, dp=dp, cp=cp, ep=ep, tp=tp)
    across = axes_across_nodes(dict(pp=pp, dp=dp, cp=cp, ep=ep, tp=tp), 8)
    for axis, axes in {
        "tp": ("tp",),
        "cp": ("cp",),
        "pp": ("pp",),
        "dp": ("dp", "cp"),
        "ep": ("ep",),
        "edp": ("edp",),
    }.items():
        links = axis_links(H100, layout, axis)
        group = mesh.group(0, *axes)
        nodes = [rank // 8 for rank in group]
        assert links.size == len(group)
        assert links.per_node == nodes.count(0)
        assert links.nodes == len(set(nodes))
        if axis in across and axis != "dp":
            assert (links.nodes > 1) == across[axis]
        crossings = sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1]))
        assert links.leaving_share == crossings / len(group)


def test_a_group_filling_a_node_leaves_through_all_its_cards():
    """Planted fault: one card for the group would make its gradients eight times as slow."""
    whole_node, one_a_node = links_of(H100, 64, 1), links_of(H100, 8, 8)
    assert whole_node.between == LINK_FRACTION * 8 * 50e9
    assert one_a_node.between == LINK_FRACTION * 50e9
    gigabytes = 16e9
    _, seconds = latency_and_bytes_s(H100, whole_node, "all_reduce", gigabytes)
    assert seconds == pytest.approx(2 * 63 / 64 * gigabytes / (0.8 * 400e9), rel=1e-12)
    # Eight groups with a member on each node share the cards: as many bytes leave the node in as much time.
    _, of_one = latency_and_bytes_s(H100, one_a_node, "all_reduce", gigabytes / 8)
    assert of_one == pytest.approx(seconds * (7 / 8) / (63 / 64), rel=1e-12)


def test_without_a_switch_a_group_uses_only_its_own_links():
    mi300x = MACHINES["mi300x"]
    inside = [links_of(mi300x, size, 1).inside for size in (2, 4, 8)]
    assert inside == pytest.approx([LINK_FRACTION * n * 64e9 for n in (1, 3, 7)])
    assert links_of(H100, 2, 1).inside == links_of(H100, 8, 1).inside
    assert send_s(mi300x, Layout(pp=8), 64e18) == pytest.approx(1e9 / LINK_FRACTION)


def test_a_measured_all_reduce_of_four_nodes():
    """4 GiB over 4 x 8 B200 with 50 GB/s a GPU: measured 22.05 ms; one card a group would say 166 ms."""
    b200 = MACHINES["b200"]
    model = collective_on(b200, links_of(b200, 32, 1), "all_reduce", 4 * 2**30)
    assert model == pytest.approx(22.05e-3, rel=0.25)
    assert hierarchical_all_reduce_s(4, 8, 4 * 2**30, (0, 1 / 900e9), (0, 1 / 50e9)) == pytest.approx(
        24.4e-3, rel=0.08
    )


def test_textbook_costs():
    a, b, n = 1e-5, 1e-10, 1e8
    assert collective_s("all_reduce", 8, n, a, b) == pytest.approx(14 * a + 2 * 7 / 8 * n * b)
    assert collective_s("all_gather", 8, n, a, b) == pytest.approx(7 * a + 7 / 8 * n * b)
    assert collective_s("reduce_scatter", 8, n, a, b) == pytest.approx(7 * a + 7 / 8 * n * b)
    assert collective_s("all_to_all", 8, n, a, b) == pytest.approx(7 * a + 7 / 8 * n * b)
    assert collective_s("broadcast", 8, n, a, b) == pytest.approx(3 * (a + n * b))
    assert collective_s("all_reduce", 8, n, a, b, "halving_doubling") == pytest.approx(
        6 * a + 2 * 7 / 8 * n * b
    )
    assert collective_s("all_reduce", 1, n, a, b) == 0
    # Bus bandwidth of nccl-tests: bytes a rank sends over the time, whatever p is.
    assert [sent_share("all_reduce", p) * p / (p - 1) for p in (2, 4, 8)] == [2, 2, 2]


def test_megatrons_and_zeros_volumes():
    """Megatron: 8 b s h (t-1)/t elements per layer and microbatch; ZeRO: 2, 2, 2 and 3 times the parameters.

    Both count gradients in the bytes in which they are stored.
    """
    job = Job(MODELS["llama-7b"], H100, 8, 4096, 8)
    for zero, times in ((0, 2), (1, 2), (2, 2), (3, 3)):
        dp, _ = gradients_bytes(job, Layout(dp=8, zero=zero), 0)
        share = times if zero < 3 else times - 2 * 4096 * 32000 / 6.738e9 / 1  # the root is gathered once
        assert dp / 2 / job.shape.num_params == pytest.approx(share * 7 / 8, rel=0.02)
    accumulated = (
        gradients_bytes(job, Layout(dp=2, zero=3), 0)[0] / gradients_bytes(job, Layout(dp=2, zero=0), 0)[0]
    )
    assert accumulated == pytest.approx((1 + 2 * 4) / 2, rel=0.05)  # 4 microbatches gather 8 times


def test_what_leaves_a_node():
    job = Job(MODELS["llama-70b"], H100, 64, 4096, 64)
    inside = step_traffic(job, parse_layout("dp8-tp8-zero1"), 0)
    assert inside["tp"].leaving == 0 < inside["dp"].leaving == inside["dp"].total
    across = step_traffic(job, parse_layout("dp4-tp16-zero1"), 0)
    assert across["tp"].leaving == across["tp"].total / 8


def test_dp_waits_below_a_token_count_independent_of_the_model():
    for num_params in (7e9, 70e9):
        tokens = critical_tokens_per_gpu(64, 400e12, 50e9)
        assert tokens == pytest.approx(63 / 64 * 8000)
        assert 2 * 63 / 64 * 2 * num_params / 50e9 == pytest.approx(4 * num_params * tokens / 400e12)


def test_of_hybrid_sharding_only_a_shards_gradients_leave_a_node():
    """Of P elements over 8 shards in a node and R nodes: 2 (R-1)/R of a shard, 1.75 P/8 for 8 nodes."""
    job = Job(MODELS["llama-7b"], H100, 64, 4096, 64, implementation=Implementation(replicate=8))
    layout = Layout(dp=64, zero=3)
    sent = step_traffic(job, layout, 0)["dp"]
    assert sent.leaving == pytest.approx(1.75 * 2 * job.shape.num_params / 8)
    assert sent.total == pytest.approx(gradients_bytes(job, layout, 0)[0])
    everywhere = step_traffic(replace(job, implementation=Implementation()), layout, 0)["dp"]
    assert everywhere.leaving > 1.6 * sent.leaving


def test_hybrid_sharding_is_faster_where_nodes_are_slowly_connected():
    """With a copy a node, weights are gathered inside it; 16-bit gradients cross the network twice, not once."""
    slow = replace(H100, card_bytes_per_s=1e9)
    seconds = []
    for replicas in (1, 8):
        how = Implementation(replicate=replicas)
        job = Job(MODELS["llama-7b"], slow, 64, 4096, 64, implementation=how)
        seconds.append(sum(step_parts(job, Layout(dp=64, zero=3)).values()))
    assert seconds[0] > 1.4 * seconds[1]
