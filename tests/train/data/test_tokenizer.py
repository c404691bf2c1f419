"""Text through a tokenizer of the package `tokenizers`: encoded in pieces, trained on, and generated from."""

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.train import generate_text, train
from minipar.train.data import tokenizer
from minipar.train.data.token_file import open_tokens
from minipar.train.data.tokenizer import Bytes, Ids, Placed, Tokenizer, encoded, write_tokens
from minipar.train.run_files import SAMPLE_TOKENS
from tests.cli.test_cli import outcome

WORDS = [
    "the rank sends its part to the next rank\n",
    "and the next rank sends it on,\r\n",
    "über alle Ränge 🙂 \n\n",
]

SUFFIXES = (".bin", ".npy")  # bare ids, and ids with a header


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A byte-level tokenizer of 300 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    """A tokenizer as sentencepiece's: it puts a space before its input, and a token may span two lines."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>"]))
    made.enable_truncation(7)  # as transformers saves it; a text is not cut
    path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("text", ["".join(WORDS * 30), "the " * 500 + "a" * 999 + " rank" * 200, "\n", ""])
def test_a_text_encoded_in_pieces_has_the_tokens_of_the_whole(text, tmp_path, path, metaspace, monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE", 200)
    monkeypatch.setattr(tokenizer, "OVERLAP", 80)
    (tmp_path / "text").write_text(text, newline="")
    for codec in map(Tokenizer, (path, metaspace)):
        pieces = [piece.tolist() for piece in encoded(tmp_path / "text", codec)]
        assert sum(pieces, []) == codec.encode(text)
        assert len(pieces) >= min(len(text) // 400, 6)


def test_pieces_without_tokens_in_common_become_one(tmp_path, path, monkeypatch):
    """A tokenizer whose tokens depend on how long its input is."""
    codec = Tokenizer(path)
    monkeypatch.setattr(tokenizer, "PIECE", 200)
    monkeypatch.setattr(
        Tokenizer, "placed", lambda self, text: [Placed(len(text), i) for i in range(len(text))]
    )
    (tmp_path / "text").write_text("a" * 1000)
    assert [piece.tolist() for piece in encoded(tmp_path / "text", codec)] == [[1000] * 1000]


@given(st.lists(st.sampled_from(WORDS), max_size=12), st.integers(1, 200), st.integers(40, 90))
def test_text_encoded_in_pieces_is_whole_and_pieces_are_bounded(tmp_path_factory, path, words, size, overlap):
    text = tmp_path_factory.mktemp("text") / "text"
    text.write_text("".join(words), newline="")
    codec = Tokenizer(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE", size)
        patch.setattr(tokenizer, "OVERLAP", overlap)
        pieces = list(encoded(text, codec))
        counts = [write_tokens(text, codec, text.with_suffix(suffix)) for suffix in SUFFIXES]
    assert sum((piece.tolist() for piece in pieces), []) == codec.encode("".join(words))
    assert all(len(piece) <= size + 3 * overlap for piece in pieces)
    assert counts == [sum(map(len, pieces))] * 2
    for suffix in SUFFIXES if counts[0] else []:
        written = open_tokens(text.with_suffix(suffix), codec.vocab_size).array
        assert written.tolist() == np.concatenate(pieces).tolist()


@given(st.text())
def test_bytes_and_ids_come_back(text):
    assert Bytes().decode(Bytes().encode(text)) == text
    assert Ids().encode(Ids().decode([3, 14, 15])) == [3, 14, 15]


def test_other_threads_run_while_a_text_is_encoded(path):
    codec, text = Tokenizer(path), "The quick brown fox " * 10_000
    ran, ends, interval = [], threading.Event(), sys.getswitchinterval()

    def run():
        while not ends.wait(0.001):
            ran.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        sys.setswitchinterval(1000)  # so that another thread runs only where this one lets it
        before = len(ran)
        codec.encode(text)
        during = len(ran) - before
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        thread.join()
    assert during


def test_half_of_a_surrogate_pair_is_refused_by_each_codec(path):
    for codec in (Tokenizer(path), Bytes(), Ids()):
        with pytest.raises(ValueError, match=r"\\ud800"):
            codec.encode("a \ud800")


RUN = dict(batch_size=4, seq_len=16, steps=2, warmup=1, verify_steps=1, trace_steps=0)
SMALL = ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=32, vocab_size=300)


def test_a_run_trains_resumes_and_generates_with_its_tokenizer(capsys, tmp_path, path):
    text, tokens = tmp_path / "text", tmp_path / "tokens.bin"
    text.write_text("".join(WORDS * 40))
    config = TrainConfig(
        model=SMALL, text=text, tokenizer=path, checkpoint_every=1, out=tmp_path / "run", **RUN
    )
    result = train(replace(config, dp=2))
    assert result.difference.loss < 1e-5
    assert result.sample.startswith("The ")
    written = generate_text(tmp_path / "run", "the next", 5)
    assert written.startswith("the next")
    assert written == generate_text(tmp_path / "run", "the next", 5, tp=2)
    code, out, err = outcome(capsys, "tokenize", str(text), "--tokenizer", str(path), "--out", str(tokens))
    assert code == 0, err
    assert f"--tokens {tokens} --tokenizer {path} --model.vocab-size 300" in out
    # The ids of a file are those of the text, so the run goes on with either.
    on = replace(
        config, text=None, tokens=tokens, steps=3, resume=tmp_path / "run", out=tmp_path / "on", eval_every=0
    )
    assert len(train(on).metrics) == 1
    with pytest.raises(ValueError, match="tokenizer=None, but .* with another one, or none"):
        train(replace(on, tokenizer=None, out=tmp_path / "third"))
    (tmp_path / "run" / "tokenizer.json").write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match="is not the tokenizer that the run was trained with"):
        generate_text(tmp_path / "run", "the next", 5)


def test_a_run_on_ids_alone_is_continued_by_ids(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(200).astype(np.uint16))
    config = TrainConfig(
        model=SMALL, tokens=tmp_path / "tokens.npy", checkpoint_every=2, out=tmp_path / "run", **RUN
    )
    assert len(train(config).sample.split()) == 1 + SAMPLE_TOKENS
    assert generate_text(tmp_path / "run", "5 6", 4).startswith("5 6 ")
    with pytest.raises(ValueError, match="prompt='The': the run has no tokenizer; give token ids"):
        generate_text(tmp_path / "run", "The", 4)


@pytest.mark.parametrize("before", [b"", b"\n" * 100_000, "é".encode() * 4096 + b"x" * 200_001])
@pytest.mark.parametrize("wrong", [b"\xffx", "é".encode()[:1]])
def test_an_invalid_byte_is_named_by_its_place_in_the_file(tmp_path, path, before, wrong):
    (tmp_path / "text").write_bytes(before + wrong)
    with pytest.raises(ValueError, match=f"text is not UTF-8: .* at byte {len(before)}$"):
        list(encoded(tmp_path / "text", Tokenizer(path)))


def test_a_folder_is_refused_before_a_text_is_encoded(capsys, tmp_path, path, monkeypatch):
    monkeypatch.setattr(tokenizer, "encoded", lambda *args: pytest.fail("the text was encoded"))
    (tmp_path / "text").write_text(WORDS[0])
    words = ["tokenize", str(tmp_path / "text"), "--tokenizer", str(path), "--out", str(tmp_path)]
    assert outcome(capsys, *words) == (
        2, "", f"minipar: out={tmp_path} is a folder; use the name of a file\n"
    )  # fmt: skip


def test_what_is_no_tokenizer_or_too_large_for_the_model_is_refused(tmp_path, path, monkeypatch):
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    for says, changes in [
        ("wrong.json is no tokenizer.json", dict(tokenizer=wrong)),
        ("missing.json: No such file", dict(tokenizer=tmp_path / "missing.json")),
        (
            "vocab_size=299 does not hold the 300 tokens .* use 300",
            dict(model=replace(SMALL, vocab_size=299)),
        ),
        ("is not UTF-8: invalid start byte at byte 0", dict(text=tmp_path / "latin")),
        (
            f"text={tmp_path / 'short'} has [0-9]+ tokens, fewer than one sample",
            dict(text=tmp_path / "short"),
        ),
    ]:
        (tmp_path / "short").write_text("the rank")
        (tmp_path / "latin").write_bytes(b"\xff" * 100)
        with pytest.raises(ValueError, match=says):
            train(
                TrainConfig(**{"model": SMALL, "tokenizer": path, "out": tmp_path / "run"} | changes, **RUN)
            )
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(
        ValueError, match=r"needs the package tokenizers; pip install 'minipar\[tokenizers\]'"
    ):
        Tokenizer(path)


@pytest.mark.parametrize("vocab_size", [1 << 16, (1 << 16) + 1])
def test_ids_are_written_as_they_are_read_whatever_the_vocabulary(tmp_path, monkeypatch, vocab_size):
    ids = np.array([0, 65535, 7], "uint32")
    monkeypatch.setattr(tokenizer, "encoded", lambda path, codec: iter([ids]))
    write_tokens(tmp_path, SimpleNamespace(vocab_size=vocab_size), tmp_path / "ids")
    assert open_tokens(tmp_path / "ids", vocab_size)[:].tolist() == ids.tolist()
