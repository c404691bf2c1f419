"""Files of token ids: read where they lie, refused with the place of what is wrong."""

import os
import pickle
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.train.data import text, token_file
from minipar.train.data.text import batch_of_step, digest_of, hold_out, load_data
from minipar.train.data.token_file import open_bytes, open_tokens
from minipar.train.verification.verify import verify

SMALL = ModelConfig(dim=16, num_layers=1, num_heads=2, max_seq_len=16, vocab_size=70_000)


def saved(folder, ids, dtype, suffix):
    path = folder / f"tokens{suffix}"
    ids = np.asarray(ids).astype(dtype)
    np.save(path, ids) if suffix == ".npy" else path.write_bytes(ids.tobytes())
    return path


@given(st.data())
def test_a_file_of_any_width_has_its_ids_batches_and_checksum(tmp_path_factory, data):
    dtype, suffix = data.draw(
        st.sampled_from(
            [
                ("uint8", ".npy"),
                ("uint16", ".npy"),
                ("uint32", ".npy"),
                ("uint16", ".bin"),
                ("uint32", ".bin"),
            ]
        )
    )
    vocab_size = 70_000 if dtype == "uint32" else 256
    ids = torch.tensor(data.draw(st.lists(st.integers(1, vocab_size - 1), min_size=5, max_size=60)))
    path = saved(tmp_path_factory.mktemp("tokens"), ids, dtype, suffix)
    file = pickle.loads(pickle.dumps(open_tokens(path, vocab_size)))
    assert len(file) == len(ids)
    for sampling in ("random", "epoch"):
        got, want = (batch_of_step(t, 3, 1, 4, 3, sampling) for t in (file, ids))
        assert torch.equal(got.tokens, want.tokens)
        assert torch.equal(got.targets, want.targets)
    if len(ids) > 10:
        parts = zip(hold_out(file, 2), hold_out(ids, 2))
        assert all(torch.equal(a[torch.arange(len(a))], b[torch.arange(len(b))]) for a, b in parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_file, "PIECE", data.draw(st.integers(1, 70)))
        if dtype != "uint8":
            assert digest_of(file, vocab_size) == digest_of(ids)
        place = data.draw(st.integers(0, len(ids) - 1))
        limit = int(ids[place])
        first = int((ids >= limit).int().argmax())
        with pytest.raises(
            ValueError, match=f"token {ids[first]} at place {first} is outside vocab_size={limit}"
        ):
            digest_of(file, limit, path)


def test_a_file_beyond_memory_gives_batches_and_is_sent_by_path(tmp_path):
    path = tmp_path / "large.bin"
    path.touch()
    os.truncate(path, 1 << 40)  # a terabyte that takes no place on the disk
    file = open_tokens(path, 256)
    assert len(file) == 1 << 39
    kept, _ = hold_out(file, 16)

    def rank(world):
        return [batch_of_step(t, 0, world.rank, 4, 16, "epoch").num_targets for t in (file, kept)]

    assert len(pickle.dumps(kept)) < 3000
    assert minipar.run(rank, world_size=2) == [[64, 64]] * 2
    assert open_bytes(path)[torch.tensor([[1 << 39]])].tolist() == [[0]]


def test_what_cannot_be_trained_on_is_refused_before_a_rank_starts(tmp_path, monkeypatch):
    module = import_module("minipar.train.verification.verify")  # the name is a function's, too
    monkeypatch.setattr(module, "run", lambda *args, **kwargs: pytest.fail("a rank was started"))

    def refused(says, path, vocab_size=70_000, **changes):
        model = ModelConfig(dim=16, num_layers=1, num_heads=2, max_seq_len=16, vocab_size=vocab_size)
        with pytest.raises(ValueError, match=says):
            verify(TrainConfig(model=model, batch_size=2, seq_len=16, steps=1, tokens=path, **changes))

    ids = np.arange(40)
    refused("tokens.npy is an array .40. of int64; use one dimension", saved(tmp_path, ids, "int64", ".npy"))
    refused("an array .4, 10. of uint16", saved(tmp_path, ids.reshape(4, 10), "uint16", ".npy"))
    (tmp_path / "words.npy").write_text("words")
    refused("words.npy: no .npy file", tmp_path / "words.npy")
    refused("missing.npy: No such file", tmp_path / "missing.npy")
    refused("missing.bin: No such file", tmp_path / "missing.bin")
    refused(
        "fewer than one sample of seq_len=16 .*use seq_len=9", saved(tmp_path, ids[:10], "uint16", ".npy")
    )
    refused("token 30 at place 30 is outside vocab_size=30", saved(tmp_path, ids, "uint16", ".bin"), 30)
    refused("every second token is 0, as if ids of 32 bits", saved(tmp_path, ids, "uint32", ".bin"), 300)
    refused("81 bytes, no whole number of uint16", saved(tmp_path, range(81), "uint8", ".bin"), 300)
    refused("tokens=.* is used in place of text", saved(tmp_path, ids, "uint16", ".bin"), text=tmp_path)


def test_a_file_with_a_dtype_may_have_every_second_id_zero(tmp_path):
    path = saved(tmp_path, [1, 0] * 20, "uint16", ".npy")
    _, digest = load_data(TrainConfig(model=SMALL, batch_size=2, seq_len=16, tokens=path))
    assert digest == digest_of(torch.tensor([1, 0] * 20))


@pytest.mark.parametrize(("vocab_size", "count"), [(1 << 16, 4), ((1 << 16) + 1, 2)])
def test_a_headerless_file_has_16_bits_an_id_up_to_65536_tokens(tmp_path, vocab_size, count):
    np.array([0, 65535, 7, 0], "uint16").tofile(tmp_path / "ids")
    assert len(open_tokens(tmp_path / "ids", vocab_size)) == count


def test_the_file_is_read_once_before_the_ranks_start(tmp_path, monkeypatch):
    config = TrainConfig(
        model=SMALL, batch_size=2, seq_len=16, tokens=saved(tmp_path, range(1, 300), "uint32", ".npy")
    )
    read, pieces_of = [], text.pieces_of
    monkeypatch.setattr(text, "pieces_of", lambda t: (read.append(len(p)) or p for p in pieces_of(t)))
    load_data(config)
    assert sum(read) == 299
