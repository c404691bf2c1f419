"""Prompts read on some ranks and texts written on others: the texts of one process, and nobody waits for a prompt."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, NGramDraft, Options, Request, apart
from minipar.inference.apart import first_tokens, serve_apart, transfer_ends
from minipar.inference.blocks import Pass
from minipar.inference.events import Kind
from minipar.inference.serve import step_line
from minipar.tensor_parallel import tensor_parallel
from tests.examples import examples
from tests.inference.test_engine import plant
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
from tests.model.texts import loud_model

CONFIG = ModelConfig(vocab_size=16, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=LONGEST)
SIDES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4)]


def load(mesh):
    return tensor_parallel(loud_model(CONFIG), mesh.comm("tp"))


def per_token(num_tokens, measured_s):
    return 1.0 + num_tokens / 16


def served(world, several, options, prefill_tp):
    return serve_apart(world, load, several, options, prefill_tp, per_token, lambda tokens: tokens / 100)


def texts_on(sides, several, options):
    ranks = minipar.run(served, several, options, sides[0], world_size=sum(sides))
    assert all(of_rank == ranks[0] for of_rank in ranks), "every rank has the same outcome"
    return ranks[0]


@given(
    sides=st.sampled_from(SIDES),
    several=st.lists(requests(LONGEST), min_size=1, max_size=5),
    options=options(),
)
@examples(20)
def test_drawn_requests_get_their_texts(sides, several, options):
    if options.draft is not None and options.draft.vocab_size not in (None, CONFIG.vocab_size):
        options = replace(options, draft=NGramDraft(1))
    outcome = texts_on(sides, several, options)
    want = texts_alone(loud_model(CONFIG), several)
    assert tokens_of(outcome.results) == want


REQUESTS = [
    Request(PROMPTS[i % 3][: 6 + 3 * (i % 3)], 12 - i % 3, temperature=8.0 * (i % 2), arrival_s=i)
    for i in range(6)
]
TIGHT = Options(block_size=4, num_blocks=9, token_budget=9)


def told(world):
    """On a rank: the requests and results that it was told of, and the outcome."""
    heard, several = [], [*REQUESTS, Request((1,) * (LONGEST - 1), 5)]
    outcome = serve_apart(
        world, load, several, TIGHT, 1, per_token, on_result=lambda n, result: heard.append((n, result))
    )
    return heard, outcome


def test_a_crowded_decode_side_tells_each_end_at_once():
    (prefill, outcome), (decode, same), (other, last) = minipar.run(told, world_size=3)
    assert outcome == same == last
    want = texts_alone(loud_model(CONFIG), REQUESTS)
    assert tokens_of(outcome.results) == [*want, []]
    assert "exceed max_seq_len" in outcome.results[-1].error
    assert {event.kind for event in outcome.events} >= {Kind.PREEMPT, Kind.RESTORE, Kind.ARRIVE, Kind.FINISH}
    for number, text in enumerate(want):
        own = [event for event in outcome.events if event.number == number]
        assert sum(event.num_tokens for event in own if event.kind == Kind.WRITE) == len(text)
    assert sum(event.kind == Kind.REFUSE for event in outcome.events) == 1
    assert prefill == other == []
    assert sorted(decode, key=lambda item: item[0]) == list(enumerate(outcome.results))
    assert decode[0][0] == len(REQUESTS), "the refused one"


def longest_gap(events, number):
    written = [event.end_s for event in events if event.number == number and event.kind == Kind.WRITE]
    return max(b - a for a, b in zip(written[1:], written[2:]))


def load_bad(mesh):
    return tensor_parallel(model_with_a_bad_token(CONFIG), mesh.comm("tp"))


def served_bad(world, several):
    told = []
    served = serve_apart(
        world, load_bad, several, TIGHT, 1, per_token, on_result=lambda number, result: told.append(number)
    )
    return served.results, sorted(told), [event.number for event in served.events if event.kind == Kind.FAIL]


def test_a_prompt_without_finite_logits_fails_alone_on_both_sides():
    several = [*REQUESTS[:3], Request((1, BAD), 4), Request((2, 3, 4, 5, 6, BAD), 9, arrival_s=1.0)]
    want = outcomes_alone(model_with_a_bad_token(CONFIG), several)
    ranks = minipar.run(served_bad, several, world_size=2)
    for results, told, failed in ranks:
        assert [(result.tokens, result.error is not None) for result in results] == want
        assert set(failed) == {number for number, (_, fails) in enumerate(want) if fails} >= {3, 4}
        assert told in ([], [0, 1, 2, 3, 4])


def test_a_long_prompt_delays_nobody_who_writes():
    long = LONGEST - 4
    several = [Request(PROMPTS[0][:3], 12), Request(PROMPTS[1][:long], 4, arrival_s=4.0)]
    plain = Options(block_size=4, num_blocks=40, token_budget=100, prefix_cache=False)
    together = Engine(loud_model(CONFIG), plain, duration=per_token)
    want = tokens_of(together.run(several))
    outcome = texts_on((1, 1), several, plain)
    assert tokens_of(outcome.results) == want
    assert longest_gap(together.events, 0) == per_token(long + 1, 0)  # a decode beside the whole prompt
    assert longest_gap(outcome.events, 0) <= per_token(2, 0) + 1e-9  # a decode beside the other one's decodes


def test_the_times_of_first_tokens_are_those_of_the_prefill_side():
    outcome = texts_on((2, 1), REQUESTS, TIGHT)
    times = first_tokens(REQUESTS, TIGHT, per_token)
    for number, time in times.items():
        first = min(e.end_s for e in outcome.events if e.number == number and e.kind == Kind.WRITE)
        assert first == time


def test_caches_wait_for_one_link_and_the_link_for_them():
    several = [Request((1,) * 4, 2), Request((1,) * 2, 2), Request((1,) * 3, 2)]
    assert transfer_ends({0: 1.0, 1: 2.0, 2: 20.0}, several, lambda tokens: 2.0 * tokens) == [9.0, 13.0, 26.0]


def test_ties_in_time_are_served_in_the_prefill_sides_order():
    """At 1e20 s, all steps end at the same time, and the second request is read before the first."""
    several = [Request(PROMPTS[i][: 7 - 3 * i], 4, arrival_s=1e20) for i in range(2)]
    narrow = replace(TIGHT, token_budget=5, policy="shortest-remaining")
    outcome = texts_on((1, 1), several, narrow)
    assert tokens_of(outcome.results) == texts_alone(loud_model(CONFIG), several)
    assert [*first_tokens(several, narrow, per_token).items()] == [(1, 1e20), (0, 1e20)]


def unsent_at_most(world, most):
    """Return the prefill rank's waits, as (caches kept, most allowed), and whether every text is right."""
    seen, right = [], apart.PrefillSide.wait_for_sends

    def watched(self, limit):
        right(self, limit)
        seen.append((len(self._unsent), limit))

    several = [Request(PROMPTS[i % 3][: 3 + i % 4], 3) for i in range(8)]
    with patch.object(apart, "MAX_UNSENT", most), patch.object(apart.PrefillSide, "wait_for_sends", watched):
        tokens = tokens_of(served(world, several, Options(), 1).results)
    return seen, tokens == texts_alone(loud_model(CONFIG), several)


def test_a_prefill_rank_keeps_few_caches_that_nobody_has_received():
    (seen, right), _ = minipar.run(unsent_at_most, 2, world_size=2)
    assert right
    assert [limit for _, limit in seen] == [2] * 8 + [0]
    assert [kept for kept, _ in seen] == [1] + [2] * 7 + [0]


FAULTS = {
    "heads permuted": (
        apart, "send_cache", "slice(heads.start - here.start, heads.stop - here.start)",
        "slice(here.stop - heads.stop, here.stop - heads.start)",
    ),
    "last token not sent": (
        apart, "recv_cache", ":num_tokens, local] = comm.recv(shape, data.dtype, source)",
        ": num_tokens - 1, local] = comm.recv(shape, data.dtype, source)[:, :, :-1]",
    ),
    "positions off by one": (Pass, "of", "], t, share", "], t + 1, share"),
}  # fmt: skip


def served_with(world, fault):
    with pytest.MonkeyPatch.context() as patch:
        if fault == "heads permuted" or world.rank > 0:  # on both sides alike, positions may be off
            plant(patch, *FAULTS[fault])
        return served(world, REQUESTS, TIGHT, 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_a_text(fault):
    outcome = minipar.run(served_with, fault, world_size=3)[0]
    want = texts_alone(loud_model(CONFIG), REQUESTS)
    assert tokens_of(outcome.results) != want


def durations(world):
    """The seconds of steps of 0 to 4 tokens by the measured line, whatever the steps themselves took."""
    line = step_line(world, load, Options(block_size=4), 2)
    return [line(num_tokens, measured_s) for num_tokens in range(5) for measured_s in (0.0, 1e9)]


def test_the_prefill_sides_line_is_one_line_on_all_ranks():
    first, *others = minipar.run(durations, world_size=3)
    assert all(other == first for other in others)
    assert first[::2] == first[1::2]
    steps = [b - a for a, b in zip(first[::2], first[2::2])]
    assert steps == pytest.approx([steps[0]] * 4, abs=1e-9)
    assert min(first) >= 0 <= steps[0]


def refused(world):
    with pytest.raises(ValueError) as caught:
        serve_apart(world, load, REQUESTS, Options(block_size=4, cache_bits=8, cache_group=4), 1)
    return str(caught.value)


def test_what_cannot_be_served_apart_is_refused():
    assert "a cache that is rounded, or of latents, is not sent" in minipar.run(refused, world_size=2)[0]
    with pytest.raises(minipar.RankError, match="decode_tp=0"):
        minipar.run(served, REQUESTS, TIGHT, 2, world_size=2)
