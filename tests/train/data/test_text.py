from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.train_config import VERIFY_DEFAULTS
from minipar.model import IGNORE_INDEX
from minipar.train.data.text import batch_of, batch_of_step, hold_out, load_text, require_samples
from tests.strategies import seeds


def test_the_embedded_text_is_english_of_a_few_hundred_kilobytes():
    text = load_text(None)
    assert text.dtype == torch.uint8
    assert len(text) > 300_000
    assert b" the " in bytes(text[:100_000].tolist())


@given(seeds, st.integers(0, 1000), st.integers(1, 8), st.integers(1, 40), st.integers(0, 60))
def test_batches_follow_seed_and_step_and_targets_follow_tokens(seed, step, size, seq_len, extra):
    text = torch.arange(seq_len + 1 + extra, dtype=torch.uint8)  # every byte names its place
    batch = batch_of_step(text, seed, step, size, seq_len)
    again = batch_of_step(text, seed, step, size, seq_len)
    assert torch.equal(batch.tokens, again.tokens)
    assert batch.tokens.shape == batch.targets.shape == (size, seq_len)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.num_targets == size * seq_len


def test_steps_and_seeds_draw_different_batches():
    text = torch.randint(256, (10_000,), dtype=torch.uint8)
    drawn = [batch_of_step(text, seed, step, 4, 16).tokens for seed in (0, 1) for step in (0, 1)]
    assert len({x.numpy().tobytes() for x in drawn}) == 4


def test_documents_are_drawn_from_seed_and_step_alone():
    config = replace(VERIFY_DEFAULTS, model=replace(VERIFY_DEFAULTS.model, documents=True), batch_size=64)
    text = torch.randint(256, (10_000,), dtype=torch.uint8)
    batch, again, plain = (
        batch_of(c, text, 3) for c in (config, replace(config, dp=2, cp=2), VERIFY_DEFAULTS)
    )
    assert all(torch.equal(a, b) for a, b in zip(batch, again) if isinstance(a, torch.Tensor))
    assert plain.positions is None
    begins = batch.positions == 0
    assert begins[:, 0].all()
    assert 3 < begins.sum() / 64 < 5
    ends = begins[:, 1:]
    assert torch.equal(batch.targets[:, :-1] == IGNORE_INDEX, ends)
    assert torch.equal(batch.targets[:, :-1][~ends], batch.tokens[:, 1:][~ends])
    assert batch.num_targets == (batch.targets != IGNORE_INDEX).sum() == batch.targets.numel() - ends.sum()
    others = [batch_of(replace(config, seed=s), text, k).positions for s, k in ((0, 3), (0, 4), (1, 3))]
    assert len({x.numpy().tobytes() for x in others}) == 3


def test_every_place_of_a_short_text_can_be_drawn():
    text = torch.arange(12, dtype=torch.uint8)
    starts = batch_of_step(text, 0, 0, 500, 8).tokens[:, 0]
    assert set(starts.tolist()) == {0, 1, 2, 3}


def test_a_text_that_cannot_be_used_is_refused_by_name(tmp_path):
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_bytes(b"")
    short.write_bytes(b"twelve bytes")
    with pytest.raises(ValueError, match="missing.txt: No such file"):
        load_text(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="directory"):
        load_text(tmp_path)
    with pytest.raises(ValueError, match="empty.txt is empty"):
        load_text(empty)
    with pytest.raises(
        ValueError, match="12 bytes, fewer than one sample of seq_len=12.*use seq_len=11 or less"
    ):
        require_samples(load_text(short), 12, short)
    require_samples(load_text(short), 11, short)
    with pytest.raises(ValueError, match="^the embedded text has 2 tokens, fewer than one sample"):
        require_samples(torch.tensor([1, 2]), 2, None, unit="tokens")


def whole(part):
    return part[torch.arange(len(part))]


@given(st.integers(1, 20), st.integers(2, 2000))
def test_held_out_pieces_are_spread_and_disjoint_from_the_rest(seq_len, extra):
    text = torch.arange(2 * (seq_len + 1) + extra)
    kept, held = map(whole, hold_out(text, seq_len))
    assert sorted([*kept.tolist(), *held.tolist()]) == text.tolist()
    assert len(held) == max(len(text) // 20, seq_len + 1)
    ends = held[1:] - held[:-1] > 1
    pieces = torch.tensor_split(held, (ends.nonzero().flatten() + 1).tolist())
    assert len(pieces) == min(20, len(held) // (seq_len + 1))
    assert all(len(piece) >= seq_len + 1 for piece in pieces)
    sections = {int(piece[-1]) * len(pieces) // len(text) for piece in pieces}
    assert len(sections) == len(pieces), "two pieces in one section of the text, and none in another"


def test_a_text_too_short_to_hold_out_a_sample_is_refused():
    with pytest.raises(ValueError, match="has 20 bytes: too few .* use eval_every=0, or seq_len=9 or less"):
        hold_out(torch.arange(20), 10)
    assert [len(x) for x in hold_out(torch.arange(20), 9)] == [10, 10]
