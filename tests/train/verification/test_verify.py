"""Any mesh is one process: over drawn meshes, models, ZeRO stages, schedules; and a planted fault is named."""

import math
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minipar.config.choices import DISPATCHES as DISPATCH_NAMES
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import VERIFY_DEFAULTS as DEFAULTS
from minipar.config.train_config import TrainConfig
from minipar.model import IGNORE_INDEX
from minipar.schedules.registry import SCHEDULES
from minipar.train.verification.legal_configs import RECOMPUTATIONS, legal_configs
from minipar.train.verification.verify import table, verify
from tests.examples import examples
from tests.strategies import config_of, mesh_sizes, seeds

VERIFY = import_module("minipar.train.verification.verify")  # the package has a function by this name
GRIDS = {4: ["2d"], 8: ["2.5d", "3d"], 9: ["2d"]}  # by the number of tp ranks
DISPATCHES = [
    "all-to-all",
    ("all-to-all", {"node_size": 2}),
    "chunks",
    ("chunks", {"node_size": 2}),
    "shadow",
    ("shadow", {"node_size": 2}),
]
models = st.builds(
    dict,
    num_kv_heads=st.sampled_from([1, 2, 4]),
    tie_embeddings=st.booleans(),
    dropout=st.sampled_from([0.0, 0.2]),
    num_experts=st.sampled_from([0, 4]),
    top_k=st.sampled_from([1, 2]),
    parallel_block=st.booleans(),
)


@st.composite
def configs(draw) -> TrainConfig:
    sizes = draw(mesh_sizes(8))
    model = draw(models)
    if model["num_experts"]:
        model["group_tokens"] = draw(st.sampled_from([2, 4]))
    choices = dict(
        zero=draw(st.integers(0, 3)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])),
        microbatches=draw(st.sampled_from([1, 2, 4])),
        sequence_parallel=draw(st.booleans()),
        cp_layout=draw(st.sampled_from(["zigzag", "contiguous"])),
        cp_attention=draw(st.sampled_from(["ring", "ulysses", "all_gather", "usp"])),
        replicate=draw(st.sampled_from([1, 1, 2])),
        tp_chunked=draw(st.booleans()),
        dispatch=draw(st.sampled_from(DISPATCHES)),
        algorithm=draw(
            st.sampled_from(["auto", "ring", "halving_doubling", "double_tree", "hierarchical", "native"])
        ),
        optimizer=draw(st.sampled_from(["adamw", "lamb", "muon"])),
        reduce_every=draw(st.sampled_from(["step", "microbatch"])),
        partition_activations=draw(st.booleans()),
        offload_activations=draw(st.booleans()),
        offload=draw(st.sampled_from(["none", "cpu", "disk"])),
        recompute=draw(st.sampled_from(["none", "selective", "full", "every:2", "every:3"])),
        sampling=draw(st.sampled_from(["random", "epoch"])),
        lr_scale=draw(st.sampled_from(["none", "linear", "sqrt"])),
        seed=draw(seeds),
    )
    # An option of a strategy that is not drawn would have the whole configuration refused.
    if sizes["tp"] in GRIDS and draw(st.booleans()):
        choices["tp_layout"] = draw(st.sampled_from(GRIDS[sizes["tp"]]))
        choices |= dict(sequence_parallel=False, partition_activations=False)
    choices["cp_ulysses"] = 2 if choices["cp_attention"] == "usp" and sizes["cp"] > 1 else 1
    choices["tp_chunked"] &= choices["sequence_parallel"]
    choices["lr_batch_size"] = None if choices["lr_scale"] == "none" else 4
    choices["replicate"] = choices["replicate"] if choices["zero"] == 3 else 1
    choices["offload"] = choices["offload"] if choices["zero"] else "none"
    cut = choices["optimizer"] == "muon" and (sizes["tp"] > 1 or choices["zero"] == 3)
    choices["optimizer"] = "adamw" if cut else choices["optimizer"]
    spread = model["num_experts"] and sizes["ep"] > 1
    choices["dispatch"] = choices["dispatch"] if spread else "all-to-all"
    whole_blocks = choices["recompute"] not in ("none", "selective")
    choices["partition_activations"] &= whole_blocks and not choices["sequence_parallel"]
    plain = choices["schedule"] in ("gpipe", "1f1b") and not (model["tie_embeddings"] and sizes["pp"] > 1)
    choices["reduce_every"] = choices["reduce_every"] if choices["zero"] == 2 and plain else "step"
    try:
        config = ModelConfig(dim=16, num_layers=4, num_heads=4, max_seq_len=32, **model)
        return config_of(
            model=config,
            batch_size=8,
            seq_len=32,
            steps=3,
            warmup=1,
            dtype="float64",
            **sizes,
            **choices,
        )
    except ValueError:
        assume(False)


# Tied embeddings under ZeRO: the two copies lie in different buckets, so no two shards of them are alike. And longer
# wavelengths, which cp's ranks turn by their own positions.
LONGER = dict(rope_theta=100.0, rope_scaling=(8.0, 1.0, 4.0, 16.0))
TIED = TrainConfig(
    model=ModelConfig(dim=16, num_layers=4, num_heads=4, max_seq_len=32, tie_embeddings=True, **LONGER),
    **dict(pp=2, cp=2, zero=1, microbatches=2, batch_size=8, seq_len=32, steps=3, dtype="float64"),
)


# Products that are put off until FSDP has freed the weights they belong to, an expert's among them.
FREED = replace(
    TIED,
    model=replace(TIED.model, num_experts=4, top_k=2, group_tokens=4),
    pp=1,
    dp=2,
    cp=1,
    zero=3,
    schedule="zb-h1",
)


# LAMB's norms are summed over tp bucket by bucket, and tp cuts this vocabulary unevenly: buckets must agree all the same.
UNEVEN = replace(
    DEFAULTS,
    model=replace(DEFAULTS.model, dim=18, num_heads=3, num_kv_heads=3, hidden_dim=48, vocab_size=260,
                  dropout=0.0),
    tp=3, pad_vocab=True, zero=1, optimizer="lamb", bucket_mb=0.0272, batch_size=2, steps=2,
)  # fmt: skip


# Ranks in two and in three dimensions: under ZeRO-3 with recomputation, as stages, and in half precision.
SQUARE = replace(
    DEFAULTS, tp=4, tp_layout="2d", steps=2, seq_len=16, model=replace(DEFAULTS.model, num_layers=2)
)
ON_GRIDS = [
    replace(SQUARE, dp=2, zero=3, recompute="full", optimizer="lamb"),
    replace(SQUARE, pp=2, zero=1, microbatches=4, schedule="zb-h1", offload="cpu"),
    SQUARE.choosing(tp=8, tp_layout="2.5d", dtype="float16"),
    replace(SQUARE, tp=8, tp_layout="3d", offload_activations=True),
]


# Biases that tp cuts, of heads that ranks share, and norms of each rank's own heads: one weight for all of them.
QWEN = replace(
    DEFAULTS, model=replace(DEFAULTS.model, head_dim=6, qkv_bias=True, qk_norm=True), steps=2, seq_len=32
)
OF_FAMILIES = [
    replace(QWEN, tp=2),
    replace(QWEN, tp=4, sequence_parallel=True, grad_clip=1e-3),
    replace(QWEN, dp=2, tp=2, zero=3),
    replace(QWEN, pp=2, tp=2, microbatches=4, schedule="zb-h1", recompute="selective"),
    replace(QWEN, dp=2, zero=1, optimizer="muon"),
    replace(QWEN, cp=2, recompute="full"),
    replace(QWEN, cp=2, tp=2, cp_attention="ulysses", zero=2),
]


OF_FAULTS = [
    *ON_GRIDS,
    *OF_FAMILIES,
    UNEVEN,
    FREED,
    replace(FREED, dtype="float16", steps=2),
    TIED,
    replace(TIED, zero=3, offload="cpu", grad_clip=1e-3, steps=2),
]


def require_equal(config: TrainConfig) -> None:
    result = verify(config)
    assert result.equal, table(result)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("config", OF_FAULTS)
def test_a_mesh_that_once_fell_gives_the_numbers_of_one_process(config):
    require_equal(config)


@pytest.mark.parametrize("cut", [dict(dp=2, tp=2), dict(dp=4, ep=2, moe=4)], ids=["tp", "ep"])
def test_zero_3_shards_what_another_axis_has_cut(cut):
    """In every run: such a parameter gets its value after its hooks, and a hook that is lost loses its gradient."""
    require_equal(DEFAULTS.choosing(zero=3, steps=1, batch_size=4, **cut))


@examples(12)
@given(configs())
def test_every_mesh_gives_the_numbers_of_one_process(config):
    require_equal(config)


def ignoring(observe):
    """The same observation of a run in which targets are ignored: every space, and all of the last sample."""

    def run(world, config, text):
        places = [import_module(f"minipar.train.{name}") for name in ("step", "reference")]
        plain = places[0].batch_of

        def batch_of(*args):
            batch = plain(*args)
            targets = batch.targets.masked_fill(batch.targets == ord(" "), IGNORE_INDEX)
            targets[-1] = IGNORE_INDEX
            return batch._replace(targets=targets, num_targets=int((targets != IGNORE_INDEX).sum()))

        for place in places:
            place.batch_of = batch_of
        try:
            return observe(world, config, text)
        finally:
            for place in places:
                place.batch_of = plain

    return run


@examples(4)
@given(configs())
def test_targets_that_are_ignored_count_on_no_mesh(config):
    plain = VERIFY._observe_rank, VERIFY._observe_one_process
    VERIFY._observe_rank, VERIFY._observe_one_process = map(ignoring, plain)
    try:
        require_equal(config)
    finally:
        VERIFY._observe_rank, VERIFY._observe_one_process = plain


DOCUMENTS = replace(DEFAULTS, model=replace(DEFAULTS.model, documents=True), steps=2, cp=2)


def across_documents(world, config, text):
    """The observation of a rank whose attention sees the tokens of earlier documents, too."""
    module = import_module("minipar.context.parallelize_context")

    def seeing_all(comm, q, k, v, positions, **options):
        return module.ring_attention(comm, q, k, v, **options)

    plain, module.ATTENTIONS = module.ATTENTIONS, {"ring": seeing_all}
    try:
        return VERIFY._observe_rank(world, config, text)
    finally:
        module.ATTENTIONS = plain


def test_attention_across_documents_diverges(monkeypatch):
    assert verify(DOCUMENTS).equal
    monkeypatch.setattr(VERIFY, "_observe_rank", across_documents)
    first = verify(DOCUMENTS).first_divergence
    assert first is not None
    assert first.what == "gradients, step 0"


@pytest.mark.parametrize(
    "changes",
    [
        dict(cp=1, pp=2, microbatches=2, zero=3),
        dict(cp_attention="ulysses", dtype="bfloat16"),
        dict(cp=1, pp=2, microbatches=2, schedule="seq1f1b"),
        dict(cp=1, dp=2, compress="sign"),
    ],
)
def test_documents_are_those_of_one_process(changes):
    require_equal(DOCUMENTS.choosing(**changes))


def test_a_planted_fault_is_named_with_its_rank(monkeypatch):
    config = replace(DEFAULTS, dp=2, steps=2)
    monkeypatch.setattr(VERIFY, "_observe_rank", faulty_observer)
    result = verify(config)
    first = result.first_divergence
    assert not result.equal
    assert first.what == "gradients, step 0"
    assert first.worst == "layers.2.mlp.up.weight"
    assert first.rank == 1
    assert "dp2 DIVERGES first in gradients, step 0: layers.2.mlp.up.weight on rank 1" in table(result)


def test_a_divergence_names_its_place_and_nan_is_never_equal(monkeypatch):
    config = replace(DEFAULTS, pp=2, dp=2, tp=2, microbatches=2, zero=1, steps=1, on_nan="skip")
    monkeypatch.setattr(
        VERIFY,
        "_observe_rank",
        partial(faulty_observer, times=math.nan),
    )
    result = verify(config)
    first = result.first_divergence
    assert (first.what, first.worst, first.difference) == (
        "gradients, step 0",
        "layers.2.mlp.up.weight",
        math.inf,
    )
    pipeline, tensor, data, zero = first.place.split("; ")
    assert pipeline == "pipeline: on pp rank 1 of 2"
    assert tensor == "tensor: [0, 48) of 96 along dim 0"
    assert data == "data: gradient summed over dp"
    assert zero.startswith("ZeRO: elements [")
    assert first.place in table(result)


def faulty_observer(world, config, text, times=1.5):
    train_step = VERIFY.train_step

    def broken(world, state, config, text, step, observe):
        def spoil():
            if world.rank in ((1,) if world.size == 2 else (4, 6)):
                (spoiled,) = [
                    x for x in state.optimizer.tensors if x.placement.name == "layers.2.mlp.up.weight"
                ]
                spoiled.grad.mul_(times)
            observe()

        return train_step(world, state, config, text, step, spoil)

    VERIFY.train_step = broken
    try:
        return VERIFY._observe_rank(world, config, text)
    finally:
        VERIFY.train_step = train_step


def test_the_sweep_has_every_axis_and_only_legal_configs():
    swept = list(legal_configs(replace(DEFAULTS), 8))
    names = {config.mesh_name for config in swept}
    assert {"dp8", "pp2-dp2-tp2", "pp4-dp2", "cp8", "dp2-tp4"} <= names
    for mesh in ("pp2-dp2-tp2", "pp2-dp4"):
        tried = {(config.zero, config.schedule) for config in swept if config.mesh_name == mesh}
        assert tried == set(product(range(4), SCHEDULES.usable()))
    assert {(c.zero, c.recompute) for c in swept} == set(product(range(4), RECOMPUTATIONS))
    assert {"dp2-tp4-2d", "pp2-tp4-2d", "cp2-tp4-2d", "tp8-2.5d", "tp8-3d"} <= names
    assert all(config.world_size == 8 for config in swept)
    assert len({(c.mesh_name, c.zero, c.schedule) for c in swept}) == len(swept)
    mixture = dict(num_experts=4, group_tokens=4, moe_every=1)
    shallow = replace(DEFAULTS, model=replace(DEFAULTS.model, num_layers=1, **mixture))
    spread = [c for c in legal_configs(shallow, 4) if c.ep > 1]
    assert {(c.zero, c.dispatch) for c in spread} == set(product(range(4), DISPATCH_NAMES))


def test_what_cannot_be_is_refused_with_what_would_work():
    for wrong, says in [
        (dict(tp=3), "tp=3 does not divide num_heads=4"),
        (dict(pp=8, microbatches=8), "use at most 4 stages"),
        (dict(ep=2, dp=2), "num_experts=0"),
        (dict(cp=3), "cp=3 with cp_layout='zigzag' does not divide seq_len=64; use seq_len=60"),
        (dict(schedule="2f2b"), "2f2b"),
        (dict(zero=4), "zero=4"),
        (dict(recompute="some"), "recompute='some'"),
        (dict(cp=2, cp_ulysses=2), "cp_ulysses=2 is for cp_attention=usp, not ring"),
        (dict(cp=4, cp_attention="usp"), "cp_ulysses=1 is a ring; use cp_ulysses=2 or 4"),
        (dict(cp=4, cp_attention="usp", cp_ulysses=3), "cp_ulysses=3 does not divide cp=4; use 1, 2 or 4"),
        (dict(dp=4, replicate=2), "replicate=2 copies the shards of zero=3, and zero=0; use zero=3"),
        (dict(dp=4, zero=3, replicate=3), "replicate=3 does not divide dp\\*cp=4"),
        (dict(dp=4, ep=4, moe=4, zero=3, replicate=2), "an expert's ranks \\(dp\\*cp/ep\\)=1; use 1"),
        (dict(tp=2, tp_chunked=True), "tp_chunked=True cuts sequence_parallel's messages"),
        (
            dict(tp=2, tp_layout="2d"),
            "tp=2 with tp_layout=2d is not a square; use tp=1, 4, 9 or 16, or tp_layout=1d",
        ),
        (
            dict(tp=4, tp_layout=("2.5d", {"depth": 1})),
            "tp_layout.depth=1 with tp_layout=2.5d: it has several squares of ranks; use 2 or more",
        ),
        (dict(tp=4, tp_layout=("2d", {"depth": 2})), "tp_layout.depth: tp_layout=2d has no options"),
        (dict(tp=4, tp_layout="2d", moe=4), "tp_layout=2d has no cut for num_experts=4; use tp_layout=1d"),
        (dict(tp=4, tp_layout="2d", sequence_parallel=True), "sequence_parallel=True is for tp_layout=1d"),
        (
            dict(tp=4, tp_layout="2d", batch_size=9),
            "tp_layout=2d's rows of ranks=2 does not divide samples \\(batch_size/dp/microbatches\\)=9; use 1, 3 or 9",
        ),
        (
            dict(tp=4, tp_layout="2d", cp=4, cp_attention="ulysses", seq_len=64),
            "cp=4 does not divide num_heads/tp=2; use cp=1 or 2",
        ),
        (
            dict(dp=4, ep=4, moe=4, dispatch=("all-to-all", {"node_size": 3})),
            "dispatch.node_size=3 does not divide ep=4; use 1, 2 or 4",
        ),
        (dict(dp=2, dispatch=("all-to-all", {"node_size": 2})), "node_size=2 brings tokens to experts"),
        (dict(dispatch="chunks"), "dispatch=chunks brings .* num_experts=0"),
        (
            dict(dp=4, moe=4, dispatch="chunks"),
            "dispatch.chunks=2 cuts what ep ranks send .* and ep=1; use ep=2 or more",
        ),
        (
            dict(dp=4, ep=4, moe=4, dispatch=("chunks", {"chunks": 10**6})),
            "dispatch.chunks=1000000 are more than the 512 rows that a rank could send, .* use 512 or fewer",
        ),
        (
            dict(dp=4, ep=4, moe=4, dispatch=("chunks", {"chunks": 0})),
            "dispatch.chunks=0 is out of range; use 1 or more",
        ),
        (
            dict(dp=4, moe=4, dispatch=("shadow", {"rows": 8.0})),
            "dispatch.rows=8.0 with ep=1: .* use 0 or more with ep=2 or more",
        ),
        (dict(dp=4, ep=4, moe=4, dispatch=("shadow", {"rows": -1.0})), "dispatch.rows=-1.0 with ep=4"),
        (dict(dp=4, ep=4, moe=4, dispatch=("shadow", {"chunks": 2})), "dispatch.chunks is no option"),
        (dict(algorithm="rings"), "algorithm='rings' is unknown; .*did you mean ring"),
        (dict(optimizer="lam"), "optimizer='lam' is unknown; use adamw, lamb or muon; did you mean lamb"),
    ]:
        with pytest.raises(ValueError, match=says):
            DEFAULTS.choosing(**wrong)


def test_float32_is_compared_too():
    assert verify(replace(DEFAULTS, dp=2, tp=2, dtype="float32", steps=2)).equal
