"""Several steps under way: the texts stay, no request is in two steps, and stages are used as the formula says."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, Options, Request, Scheduler
from minipar.inference.engine import Result, as_measured, one_second
from minipar.inference.events import Kind
from minipar.inference.rotation import StageClock, share, utilisation
from minipar.inference.static import in_steps
from tests.examples import examples
from tests.inference.meshes import cut
from tests.inference.texts import LONGEST, PROMPTS, VOCAB, alone, options, requests, texts_alone, tokens_of
from tests.model.texts import loud_model

TINY = ModelConfig(vocab_size=VOCAB, dim=8, num_layers=1, num_heads=2, max_seq_len=LONGEST)
MODEL = loud_model(TINY)
DEEP = ModelConfig(vocab_size=VOCAB, dim=8, num_layers=4, num_heads=2, max_seq_len=LONGEST)
CROWD = [
    Request(PROMPTS[i % 3][: 3 + i], 6, temperature=8.0 * (i % 2), seed=i, arrival_s=i // 3) for i in range(6)
]


def serve(several, options, num_groups):
    """Serve in one process with steps under way, and look at who is under way after each."""
    engine = Engine(MODEL, options)
    engine.scheduler.num_groups = num_groups
    results = [Result() for _ in several]
    for num_steps, _ in enumerate(engine.iterate(several, results)):
        assert sum(s.is_under_way for s in engine.scheduler.sequences) <= options.max_running
        assert num_steps < 10_000, "requests go round for ever"
    return engine, tokens_of(results)


@given(
    several=st.lists(requests(LONGEST), min_size=1, max_size=6),
    options=options(),
    num_groups=st.integers(2, 4),
)
@examples(25)
def test_groups_change_no_text_and_leak_no_block(several, options, num_groups):
    engine, texts = serve(several, options, num_groups)
    assert texts == texts_alone(MODEL, several)
    kept = 0 if engine.prefix is None else len(engine.prefix)
    assert engine.pool.num_free + kept == options.num_blocks


def test_a_request_in_two_steps_or_tokens_swapped_are_seen(monkeypatch):
    want, plain = texts_alone(MODEL, CROWD), Options(block_size=4, num_blocks=40)
    assert serve(CROWD, plain, 3)[1] == want

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_group", lambda self, num_under_way: self.sequences)
        with pytest.raises(AssertionError, match="enters a step before its tokens are back"):
            serve(CROWD, plain, 3)

    waiting: deque = deque()

    end = Engine._end

    def end_with_others(self, step, results):
        """Give each step the answer of the one before, if it has the same shape."""
        waiting.append(step.answer)
        if len(waiting) > 1 and waiting[0].shape == step.answer.shape:
            step.answer = waiting.popleft()
        return end(self, step, results)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_end", end_with_others)
        assert serve(CROWD, plain, 3)[1] != want, "a group got the tokens of another"


def serve_on(world, several):
    """On a stage of pp: (texts, log) with one group, and with one for each stage."""
    (mesh, stage), outcomes = cut(world, loud_model(DEEP), dict(pp=world.size)), []
    for num_groups in (1, world.size):
        engine = Engine(stage, Options(block_size=4, num_blocks=14, prefix_cache=False), mesh)
        engine.scheduler.num_groups = num_groups
        stopped = engine.iterate(several, [Result() for _ in several])
        next(stopped)
        stopped.close()
        texts = tokens_of(engine.run(several))
        outcomes.append((texts, engine.events, engine.steps, engine.pool.num_free))
    return outcomes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_requests", [2, 4])
def test_four_stages_compute_as_long_as_the_formula_says(num_requests):
    several = [Request(PROMPTS[i % 3][: 3 + i], 6, temperature=8.0, seed=i) for i in range(num_requests)]
    ranks = minipar.run(serve_on, several, world_size=4)
    want = texts_alone(loud_model(DEEP), several)
    for outcomes in ranks:
        for num_groups, (texts, events, steps, num_free) in zip((1, num_requests), outcomes):
            assert texts == want
            assert num_free == 14
            assert (events, steps) == ranks[0][0 if num_groups == 1 else 1][1:3]
            last_s = max(event.end_s for event in events if event.kind == Kind.FINISH)
            # A step computes for a quarter of a second in each of four stages.
            used = (
                len({(e.begin_s, e.end_s) for e in events if e.kind in (Kind.PREFILL, Kind.DECODE)})
                / 4
                / last_s
            )
            counted = [e for e in in_steps(events, steps) if e.kind == Kind.DECODE and e.begin_s < 5]
            assert {e.end_s - e.begin_s for e in counted} == {1.0}
            assert used == pytest.approx(utilisation(num_groups, 4, 6), abs=1e-12)


def test_utilisation_tends_to_groups_over_stages():
    assert utilisation(3, 4, 10**9) == pytest.approx(3 / 4, abs=1e-9)
    with pytest.raises(ValueError, match="num_groups=5 exceeds num_stages=4"):
        utilisation(5, 4, 1)


def test_free_requests_are_dealt_out_evenly():
    dealt, free = [], 5
    for under_way in range(4):
        dealt.append(share(free, 5, under_way, 4))
        free -= dealt[-1]
    assert dealt == [2, 1, 1, 1]
    assert share(9, 12, 3, 4) == 3, "a crowd that arrives together is spread over the groups"


def test_a_short_step_waits_behind_a_long_one():
    clock = StageClock(2)
    assert clock.run(0.0, [5.0, 5.0]) == (0.0, 10.0)
    assert clock.run(0.0, [1.0, 1.0]) == (5.0, 11.0)


def test_a_measured_time_is_that_of_the_last_stage():
    for duration, want in ((as_measured, [0.0, 0.0, 6.0]), (one_second, [1 / 3] * 3)):
        engine = Engine(MODEL, Options(block_size=4, num_blocks=40), duration=duration)
        engine.num_stages = 3
        assert engine._stage_seconds(5, 6.0) == want


def test_a_request_cancelled_under_way_leaves_the_others_texts():
    engine = Engine(MODEL, Options(block_size=4, num_blocks=40, prefix_cache=False))
    engine.scheduler.num_groups = 3
    results = [Result() for _ in CROWD]
    steps = engine.iterate(CROWD, results)
    next(steps)
    cancelled = next(s.number for s in engine.scheduler.sequences if s.is_under_way)
    engine.cancel(cancelled)
    for _ in steps:
        pass
    for number, (result, request) in enumerate(zip(results, CROWD)):
        assert result.tokens == ([] if number == cancelled else alone(MODEL, request))
    assert engine.pool.num_free == 40
