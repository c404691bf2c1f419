"""On every mesh of tp x pp x cp ranks, with experts over ep, the engine writes what it writes in one process."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, ModelDraft, NGramDraft, Options, Request
from minipar.inference.events import Kind
from tests.examples import examples
from tests.inference.meshes import cut
from tests.inference.test_engine import crowd
from tests.inference.texts import (
    BAD,
    LONGEST,
    PROMPTS,
    model_with_a_bad_token,
    options,
    outcomes_alone,
    requests,
    texts_alone,
    tokens_of,
)
from tests.model.texts import configs, loud_model
from tests.strategies import num_ranks

CONFIG = ModelConfig(vocab_size=16, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32)
EXPERTS = dict(num_experts=4, top_k=2, capacity_factor=None)
DRAFT = ModelConfig(vocab_size=16, dim=8, num_layers=1, num_heads=1, max_seq_len=32)
REQUESTS = [
    Request(PROMPTS[i % 2][: 6 + 3 * (i % 3)], 8 - i % 3, temperature=8.0 * (i % 2), arrival_s=i // 2)
    for i in range(6)
] + [Request((1,) * 40, 5)]
OPTIONS = [
    dict(),
    dict(draft=NGramDraft(1)),
    dict(draft=ModelDraft(loud_model(DRAFT)), preemption="swap", prefix_cache=False),
]


def mesh_of(pp=1, dp=1, cp=1, tp=1, ep=1) -> dict[str, int]:
    return dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)


def serve_on(world, sizes):
    """On a rank: results with each of the options, preemptions, and the bytes of this rank's cache."""
    mesh, stage = cut(world, loud_model(CONFIG), sizes)
    outcomes, held, sent = [], 0, []
    for own in OPTIONS:
        engine = Engine(stage, Options(block_size=4, num_blocks=8, token_budget=9, **own), mesh)
        pp, ranks = engine.stages.pp, engine.stages.ranks
        pp.traffic.reset()
        ranks.traffic.reset()
        results = engine.run(REQUESTS)
        outcomes.append((tokens_of(results), results[-1].error, engine.events))
        held = sum(memory.nbytes for memory in engine.paged.memories)
        writes = sum(event.kind == Kind.WRITE for event in engine.events)
        told = 8 * writes * (engine.options.num_drafts + 1) + 8 * len(engine.steps)
        between = pp.traffic.by_kind.get("send", 0), sum(s.num_tokens for s in engine.steps)
        sent.append((between, ranks.traffic.by_kind.get("broadcast", 0), told))
    return outcomes, held, sent


MESHES = [
    mesh_of(tp=2),
    mesh_of(tp=2, pp=2),
    mesh_of(pp=2),
    mesh_of(tp=4),
    mesh_of(cp=2),
    mesh_of(cp=2, pp=2),
    mesh_of(cp=2, tp=2),
    mesh_of(cp=4),
]


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.thorough
def test_every_mesh_serves_the_texts_of_requests_alone(sizes):
    want = texts_alone(loud_model(CONFIG), REQUESTS[:-1])
    world_size = num_ranks(sizes)
    ranks = minipar.run(serve_on, sizes, world_size=world_size)
    whole_bytes = 8 * 4 * 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 8
    copies = max(1, sizes["tp"] // CONFIG.num_kv_heads)
    assert sum(held for _, held, _ in ranks) == whole_bytes * copies
    for outcomes, _, _ in ranks:
        for texts, error, _ in outcomes:
            assert texts == [*want, []]
            assert "exceed max_seq_len=32" in error
        assert outcomes[0][2] == ranks[0][0][0][2], "the ranks' logs are the same"
    happened = {event.kind for _, _, events in ranks[0][0] for event in events}
    assert happened >= {Kind.PREEMPT, Kind.RESTORE, Kind.HIT, Kind.ACCEPTED}
    for i in range(len(OPTIONS)):
        (_, _, told), broadcast = ranks[0][2][i], sum(sent[i][1] for _, _, sent in ranks)
        assert broadcast == told * (world_size - 1), "each rank is told the tokens and the time once"
        num_tokens = ranks[0][2][i][0][1]
        between = sum(sent[i][0][0] for _, _, sent in ranks)
        assert between == (num_tokens * CONFIG.dim * 8 * sizes["tp"] if sizes["pp"] == 2 else 0)


def serve_drawn(world, sizes, config, requests, options):
    """On a rank: the texts, and the blocks that are free afterwards but for those of the prefix cache."""
    mesh, stage = cut(world, loud_model(config), sizes)
    engine = Engine(stage, options, mesh)
    results = engine.run(requests)
    kept = 0 if engine.prefix is None else len(engine.prefix)
    return tokens_of(results), engine.pool.num_free + kept


CHANGES = [
    dict(cache_bits=4, cache_group=4),
    dict(weight_bits=8),
    dict(weight_bits=4, weight_group=4),
    dict(offload="disk"),
]


def crowd_on(world, sizes, changes):
    mesh, stage = cut(world, loud_model(CONFIG), sizes)
    several, options = crowd()
    return Engine(stage, replace(options, **changes), mesh).run(several)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("sizes", [mesh_of(tp=2), mesh_of(tp=2, pp=2), mesh_of(tp=4)], ids=str)
@pytest.mark.sampled(6)
def test_rounded_and_streamed_texts_are_those_of_one_process(sizes, changes):
    several, options = crowd()
    rounding = {name: value for name, value in changes.items() if name != "offload"}
    want = Engine(loud_model(CONFIG), replace(options, **rounding)).run(several)
    ranks = minipar.run(crowd_on, sizes, changes, world_size=num_ranks(sizes))
    assert ranks == [want] * len(ranks)


WITH_EXPERTS = [
    mesh_of(dp=2, ep=2),
    mesh_of(dp=4, ep=4),
    mesh_of(dp=2, ep=2, tp=2),
    mesh_of(dp=2, ep=2, pp=2),
    mesh_of(cp=2, ep=2),
    mesh_of(cp=4, ep=2),
    mesh_of(cp=4, ep=4),
    mesh_of(cp=2, ep=2, tp=2),
    mesh_of(cp=2, ep=2, pp=2),
]


@st.composite
def meshes(draw):
    """A mesh of at most eight ranks, and a model and options for it. Experts lie on cp ranks, or on ranks of their own."""
    sizes = draw(st.sampled_from([*MESHES[4:], mesh_of(cp=3), *WITH_EXPERTS]))
    experts = (EXPERTS,) if sizes["ep"] > 1 else ({}, EXPERTS)
    config = draw(
        configs(experts=experts, max_seq_len=LONGEST).filter(
            lambda c: c.num_layers >= sizes["pp"] and not (sizes["cp"] > 1 and c.kv_latent_dim)
        )
    )
    if sizes["tp"] > 1:
        config = replace(config, vocab_size=14)
    return sizes, config, draw(options(cp=sizes["cp"]))


@given(drawn=meshes(), several=st.lists(requests(LONGEST), min_size=1, max_size=5))
@examples(20)
def test_drawn_requests_get_their_texts_on_any_ranks(drawn, several):
    sizes, config, options = drawn
    if options.draft is not None and options.draft.vocab_size not in (None, config.vocab_size):
        options = replace(options, draft=NGramDraft(1))
    want = texts_alone(loud_model(config), several)
    for texts, num_free in minipar.run(
        serve_drawn, sizes, config, several, options, world_size=num_ranks(sizes)
    ):
        assert texts == want
        assert num_free == options.num_blocks, "blocks leaked"


def test_one_by_one_a_text_does_not_depend_on_the_ranks_it_lies_on():
    plain = Options(block_size=4, num_blocks=8, token_budget=9, one_by_one=True)
    want = texts_alone(loud_model(CONFIG), REQUESTS[:4])
    for texts, _ in minipar.run(serve_drawn, mesh_of(cp=2), CONFIG, REQUESTS[:4], plain, world_size=2):
        assert texts == want


SOUR = [*REQUESTS[:3], Request((1, BAD, 2), 5), Request((3, 4, BAD), 5, temperature=8.0)]


def serve_with_a_bad_token(world, every_sizes):
    """On a rank: the outcomes on each of these meshes of the same ranks."""
    outcomes = []
    for sizes in every_sizes:
        mesh, stage = cut(world, model_with_a_bad_token(CONFIG), sizes)
        engine = Engine(stage, Options(block_size=4, draft=NGramDraft(1)), mesh)
        outcomes.append([(result.tokens, result.error is not None) for result in engine.run(SOUR)])
    return outcomes


def test_on_a_mesh_a_request_without_finite_logits_fails_alone():
    want = outcomes_alone(model_with_a_bad_token(CONFIG), SOUR)
    assert {failed for _, failed in want} == {True, False}
    meshes = [mesh_of(tp=2), mesh_of(pp=2), mesh_of(cp=2)]
    for outcomes in minipar.run(serve_with_a_bad_token, meshes, world_size=2):
        assert outcomes == [want] * len(meshes)
