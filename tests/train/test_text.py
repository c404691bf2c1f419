import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.train.text import batch_of_step, load_text, require_samples
from tests.strategies import seeds


def test_the_embedded_text_is_english_of_a_few_hundred_kilobytes():
    text = load_text(None)
    assert text.dtype == torch.uint8
    assert len(text) > 300_000
    assert b" the " in bytes(text[:100_000].tolist())


@given(seeds, st.integers(0, 1000), st.integers(1, 8), st.integers(1, 40), st.integers(0, 60))
def test_a_batch_is_a_function_of_seed_and_step_and_targets_follow_their_tokens(
    seed, step, size, seq_len, extra
):
    text = torch.arange(seq_len + 1 + extra, dtype=torch.uint8)  # every byte names its place
    batch = batch_of_step(text, seed, step, size, seq_len)
    again = batch_of_step(text, seed, step, size, seq_len)
    assert torch.equal(batch.tokens, again.tokens)
    assert batch.tokens.shape == batch.targets.shape == (size, seq_len)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.count == size * seq_len


def test_steps_and_seeds_draw_different_batches():
    text = torch.randint(256, (10_000,), dtype=torch.uint8)
    drawn = [batch_of_step(text, seed, step, 4, 16).tokens for seed in (0, 1) for step in (0, 1)]
    assert len({x.numpy().tobytes() for x in drawn}) == 4


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
