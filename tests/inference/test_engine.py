"""Whatever the batch, the blocks, the budget, the policy and the drafts, each request gets the text it gets alone."""

import inspect
import textwrap
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, ModelDraft, NGramDraft, Options, Request, Result, prefix
from minipar.inference.blocks import Pass, Together, cache_bytes
from minipar.inference.events import Kind
from minipar.inference.paged_model import PagedModel
from minipar.inference.scheduler import Scheduler
from minipar.inference.speculative import Guess
from minipar.model import Transformer
from minipar.model.attention import plain_attention
from tests.examples import examples
from tests.inference.texts import (
    BAD,
    LONGEST,
    PROMPTS,
    VOCAB,
    alone,
    model_with_a_bad_token,
    options,
    outcome_alone,
    outcomes_alone,
    requests,
    tokens_of,
)
from tests.model.texts import ROUTED_ALONE, configs, loud_model

SMALL = ModelConfig(vocab_size=VOCAB, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=LONGEST)


def serve_and_compare(model, requests, options: Options) -> Engine:
    """Serve the requests, look at the blocks after every step, and compare each text with that of the request alone."""
    engine = Engine(model, options)
    for result, request in zip(served(engine, requests), requests, strict=True):
        assert result.error is None
        assert result.tokens == alone(model, request)
    kept = 0 if engine.prefix is None else len(engine.prefix)
    assert engine.pool.num_free == options.num_blocks - kept, "blocks leaked"
    return engine


def served(engine, requests):
    results = [Result() for _ in requests]
    for plan in engine.iterate(requests, results):
        assert plan.num_tokens <= engine.options.token_budget
        check_blocks(engine)
    return results


def check_blocks(engine):
    """Every block is counted as often as it is held, and no request holds more than it needs."""
    holders = [0] * engine.pool.num_blocks
    for sequence in engine.scheduler.sequences:
        assert len(sequence.table) * engine.pool.block_size < sequence.num_read + engine.pool.block_size
        for block in sequence.table:
            holders[block] += 1
    for block in [] if engine.prefix is None else engine.prefix._blocks.values():
        holders[block] += 1
    assert holders == engine.pool.holders
    assert engine.pool.num_free == holders.count(0)


@given(
    config=configs(experts=({}, {}, ROUTED_ALONE), max_seq_len=LONGEST),
    several=st.lists(requests(LONGEST), min_size=1, max_size=6),
    options=options(),
)
@examples(60)
def test_each_request_gets_the_text_it_gets_alone(config, several, options):
    serve_and_compare(loud_model(config), several, options)


@given(
    config=configs(experts=({}, {}, ROUTED_ALONE), max_seq_len=LONGEST),
    several=st.lists(requests(LONGEST), min_size=1, max_size=6),
    options=options(),
)
@examples(40)
def test_a_request_without_finite_logits_fails_alone(config, several, options):
    model = model_with_a_bad_token(config)
    engine = Engine(model, options)
    for result, request in zip(served(engine, several), several, strict=True):
        assert (result.tokens, result.error is not None) == outcome_alone(model, request)
        assert result.error is None or "have nan or inf" in result.error


class BadDraft:
    vocab_size = None

    def guess(self, text, request, num_drafts, purpose):
        return [Guess(BAD, None)] * num_drafts


@pytest.mark.parametrize("rule", ["same text", "rejection"])
def test_a_guess_that_brings_nan_fails_no_request(rule):
    model = model_with_a_bad_token(SMALL)
    several = [Request(PROMPTS[i % 3][: 3 + i], 8) for i in range(6)]
    want = outcomes_alone(model, several)
    assert any(len(tokens) > 2 for tokens, _ in want)
    for result, outcome in zip(Engine(model, Options(draft=BadDraft(), rule=rule)).run(several), want):
        assert (result.tokens, result.error is not None) == outcome


@pytest.mark.parametrize("prompts", [[(BAD,), (3,)], [(3,), (BAD,)]])
def test_nan_of_one_token_reaches_no_request_read_with_it(prompts):
    model = model_with_a_bad_token(SMALL)
    several = [Request(prompt, 4) for prompt in prompts]
    for result, outcome in zip(Engine(model).run(several), outcomes_alone(model, several)):
        assert (result.tokens, result.error is not None) == outcome


def test_a_core_replaced_after_the_engine_was_made_is_the_one_used():
    model, several = loud_model(SMALL), [Request(prompt[:6], 4) for prompt in PROMPTS[:2]]
    engine, calls = Engine(model), []
    for attention in engine.paged.attentions:
        attention.overrides.core = lambda *args, **how: calls.append(how) or plain_attention(*args, **how)
    assert [result.tokens for result in engine.run(several)] == [alone(model, request) for request in several]
    assert calls


def test_a_failed_request_leaves_no_prefix_behind():
    model = model_with_a_bad_token(SMALL)
    several = [Request((*PROMPTS[0][:6], BAD), 2), Request(PROMPTS[0][:8], 2, arrival_s=9.0)]
    failed, served = Engine(model, Options(block_size=2)).run(several)
    assert failed.error is not None
    assert (served.tokens, served.error is not None) == outcome_alone(model, several[1])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_wrong_weight_fails_every_request_by_name(wrong):
    model = loud_model(SMALL)
    with torch.no_grad():
        model.layers["0"].mlp.up.weight[0, 0] = wrong
    for draft in (None, NGramDraft(1), ModelDraft(model)):
        for result in Engine(model, Options(draft=draft)).run(
            [Request((1, 2, 1, 2), 4), Request((3,), 4, 0.8)]
        ):
            assert not result.tokens
            assert "use another checkpoint" in result.error


def test_weights_loaded_between_two_runs_leave_no_prefix_behind():
    model, request = loud_model(SMALL), Request(PROMPTS[0][:16], 8)
    engine = Engine(model, Options(block_size=4))
    engine.run([request])
    model.load_state_dict(loud_model(SMALL, seed=1).state_dict())
    assert engine.run([request])[0].tokens == alone(model, request)


@given(
    several=st.lists(requests(LONGEST, temperatures=(0.0,)), min_size=1, max_size=6),
    options=options(rules=("rejection",)),
)
def test_greedy_text_is_the_same_by_either_rule_of_speculation(several, options):
    serve_and_compare(loud_model(SMALL), several, options)


def crowd() -> tuple[list[Request], Options]:
    """Requests and options with which everything happens: preemption, prefix hits, copies, wrong and right drafts."""
    several = [
        Request(
            PROMPTS[i % 2][: 8 + 4 * (i % 3 == 0)], 12 - i % 3, arrival_s=i // 2, temperature=8.0 * (i % 2)
        )
        for i in range(8)
    ]
    return several, Options(block_size=4, num_blocks=9, token_budget=9, draft=NGramDraft(1))


def test_in_a_crowd_everything_happens():
    copies = []
    plain = PagedModel.copy_block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedModel, "copy_block", lambda *args: copies.append(args) or plain(*args))
        engine = serve_and_compare(loud_model(SMALL), *crowd())
    tokens = {kind: sum(e.num_tokens for e in engine.events if e.kind == kind) for kind in Kind}
    assert len(copies) > 0
    assert any(e.kind == Kind.PREEMPT for e in engine.events)
    assert tokens[Kind.HIT] > 0
    assert 0 < tokens[Kind.ACCEPTED] < tokens[Kind.GUESSED]


FAULTS = {
    "block freed twice": (Scheduler, "_release", "release(block)", "release(block); self.pool.release(block)"),
    "block not freed": (Scheduler, "remove", "self._release(sequence)", "pass"),
    "table not copied on write": (Scheduler, "_make_room", "if i >= first and", "if i > first and"),
    "copy is empty": (PagedModel, "copy_block", "memory.copy(source, destination)", "pass"),
    "hash without its parent": (prefix, "block_key", "parent + ", ""),
    "positions begin anew": (Pass, "of", "], t, share", "], t - rows.begin, share"),
    "the last token unseen": (Together, "of", "< numbers[:, 1:2]", "< numbers[:, 1:2] - 1"),
    "cache kept after preemption": (
        Scheduler, "_preempt_one_after", "victim.num_read if self.swap else 0", "victim.num_read",
    ),
    "rejected draft kept": (Engine, "_write", "read.count + right", "read.count + len(read.guesses)"),
    "prompt wholly cached": (Scheduler, "_admit", "len(sequence.text) - 1", "len(sequence.text)"),
}  # fmt: skip


def plant(monkeypatch, owner, name, right, wrong):
    """Replace a function by one in whose source `right` has become `wrong`."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(right) == 1
    made: dict[str, object] = {}
    code = "from __future__ import annotations\n" + source.replace(right, wrong)
    exec(code, getattr(owner, name).__globals__, made)
    monkeypatch.setattr(owner, name, made[name])


def crowded(model) -> None:
    several, options = crowd()
    several.append(
        Request((*PROMPTS[0][4:8], 1), 6, arrival_s=0.5)
    )  # its first block is another text's second
    serve_and_compare(model, several, options)
    serve_and_compare(model, several, replace(options, prefix_cache=False))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, fault):
    plant(monkeypatch, *FAULTS[fault])
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        crowded(loud_model(SMALL))


def test_without_a_fault_the_same_crowd_is_served():
    crowded(loud_model(SMALL))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_by_one_the_logits_are_the_same_to_the_bit(dtype):
    model = Transformer(SMALL, dtype=dtype)
    several, options = crowd()

    def logits(requests, **changes):
        """The logits from which each token of a text was chosen, by request and position; rows of wrong drafts apart."""
        rows = {}
        engine = Engine(model, replace(options, one_by_one=True, **changes))
        choose = engine._choose

        def note(sequence, guesses, logits, likeliest):
            written = choose(sequence, guesses, logits, likeliest)
            for i, token in enumerate(written):
                rows[sequence.number, len(sequence.text) + i] = (token, logits[i].tolist())
            return written

        engine._choose = note
        engine.run(requests)
        return rows

    together = logits(several)
    assert len(together) == sum(r.max_new_tokens for r in several)
    assert logits(several, block_size=3, num_blocks=30, token_budget=64, draft=None) == together
    assert logits(several[:1]).items() <= together.items()


def test_whoever_stops_early_leaves_nothing_behind():
    engine = Engine(loud_model(SMALL), Options(block_size=4, num_blocks=9, prefix_cache=False))
    steps = engine.iterate(crowd()[0], [Result() for _ in range(8)])
    next(steps)
    assert engine.pool.num_free < 9
    with pytest.raises(RuntimeError, match="another iterate of this engine is open"):
        engine.run(crowd()[0])
    steps.close()
    assert engine.pool.num_free == 9
    swapping = Engine(loud_model(SMALL), replace(crowd()[1], preemption="swap"))
    steps = swapping.iterate(crowd()[0], [Result() for _ in range(8)])
    while not swapping._saved:
        next(steps)
    number = next(iter(swapping._saved))
    swapping.cancel(number)
    assert number not in swapping._saved
    while not swapping._saved:
        next(steps)
    steps.close()
    assert swapping._saved == {}
    swapping.run(crowd()[0])
    assert any(event.kind == Kind.RESTORE for event in swapping.events)


def test_the_cache_of_a_request_has_the_bytes_of_the_formula():
    engine = Engine(loud_model(SMALL), Options(block_size=4, num_blocks=10, prefix_cache=False))
    block_bytes = sum(memory.nbytes for memory in engine.paged.memories) // 10
    for _ in engine.iterate([Request(PROMPTS[0][:9], 8)], [Result()]):
        for sequence in engine.scheduler.sequences:
            held = len(sequence.table) * block_bytes
            assert held == cache_bytes(SMALL, sequence.num_read, block_size=4, element_bytes=8)
    assert block_bytes == 4 * 2 * 2 * 2 * 4 * 8  # b, keys and values, L, h_kv, d, e


def test_one_that_cannot_be_served_is_named_and_the_others_are_served():
    model, fine = loud_model(SMALL), Request((1, 2), 4)
    several = [
        fine,
        Request((1,) * 20, 5),
        Request((1, VOCAB), 5),
        Request((1,) * 10, 10),
        fine,
    ]
    results = Engine(model, Options(block_size=4, num_blocks=4)).run(several)
    assert results[1].error == (
        "20 tokens of prompt and max_new_tokens=5 exceed max_seq_len=24; shorten one of them"
    )
    assert results[2].error == "prompt has token 13; vocab_size=13 allows 0 to 12"
    assert results[3].error == "20 tokens need 5 blocks of 4; num_blocks=4"
    assert tokens_of(results[1:4]) == [[], [], []]
    assert results[0].tokens == results[4].tokens == alone(model, fine)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(policy="shortest"), "policy='shortest' is unknown; use first-come, shortest-remaining or"),
        (dict(block_size=0), "block_size=0; use a whole number of 1 or more"),
        (dict(token_budget=0), "token_budget=0"),
        (dict(preemption="drop"), "preemption='drop' is unknown; use recompute or swap"),
        (dict(rule="hope"), "rule='hope' is unknown"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        Options(**wrong)


def test_a_draft_of_another_vocabulary_is_refused():
    other = Transformer(ModelConfig(vocab_size=VOCAB + 1, dim=8, num_layers=1, num_heads=1))
    with pytest.raises(ValueError, match="the draft has vocab_size=14, the model 13"):
        Engine(loud_model(SMALL), Options(draft=ModelDraft(other)))


def test_afterwards_the_model_is_as_it_was():
    model = loud_model(SMALL).train()
    next(iter(model.layers.values())).eval()
    before = {id(m): (m.training, sorted(vars(m))) for m in model.modules()}
    tokens = torch.tensor([[1, 2, 3]])
    want = model(tokens)
    Engine(model).run([Request((1, 2), 4)])
    assert model.training
    assert {id(m): (m.training, sorted(vars(m))) for m in model.modules()} == before
    assert torch.equal(model(tokens), want)
