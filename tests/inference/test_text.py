"""The text of an answer does not depend on how its tokens come, and is the whole decode without the prompt's text."""

from os.path import commonprefix

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.inference import text as text_module
from minipar.inference.text import Text
from minipar.train.data.tokenizer import Bytes, Ids, Tokenizer
from tests.examples import examples

SAMPLE = "the cat sat on the mat. 日本 é "


def byte_level(tk):
    made = tk.Tokenizer(tk.models.BPE())
    made.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tk.decoders.ByteLevel()
    return made, tk.pre_tokenizers.ByteLevel.alphabet()


def metaspace(tk):
    made = tk.Tokenizer(tk.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = tk.pre_tokenizers.Metaspace(), tk.decoders.Metaspace()
    return made, []


def llama(tk):
    """A tokenizer like Llama 2's: a space before the first word, and bytes for characters outside the vocabulary."""
    made = tk.Tokenizer(tk.models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = tk.normalizers.Sequence([tk.normalizers.Prepend("▁"), tk.normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = tk.pre_tokenizers.Split("▁", "merged_with_next")
    parts = [
        tk.decoders.Replace("▁", " "),
        tk.decoders.ByteFallback(),
        tk.decoders.Fuse(),
        tk.decoders.Strip(" ", 1, 0),
    ]
    made.decoder = tk.decoders.Sequence(parts)
    return made, []


def word_piece(tk):
    made = tk.Tokenizer(tk.models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = tk.pre_tokenizers.Whitespace(), tk.decoders.WordPiece()
    return made, []


@pytest.fixture(scope="module", params=["bytes", "ids", byte_level, metaspace, llama, word_piece])
def codec(request, tmp_path_factory):
    if isinstance(request.param, str):
        codec = Bytes() if request.param == "bytes" else Ids()
        codec.vocab_size = 256
        return codec
    tk = pytest.importorskip("tokenizers")
    made, alphabet = request.param(tk)
    of_bytes = [f"<0x{i:02X}>" for i in range(256)] if request.param is llama else []
    trainer = tk.trainers.WordPieceTrainer if request.param is word_piece else tk.trainers.BpeTrainer
    more = dict(show_progress=False, special_tokens=["<unk>", *of_bytes], initial_alphabet=alphabet)
    made.train_from_iterator([SAMPLE] * 3, trainer(vocab_size=len(of_bytes) + len(alphabet) + 60, **more))
    path = tmp_path_factory.mktemp("codec") / "tokenizer.json"
    made.save(str(path))
    return Tokenizer(path)


def text_of(codec, prompt, groups, stop=()):
    text, pieces = Text(codec, stop, prompt), []
    for i, group in enumerate(groups):
        pieces.append(text.add(group, i + 1 == len(groups)))
        if text.has_stopped:
            break
    return "".join(pieces), text


def grouped(tokens, draw):
    groups = []
    while tokens:
        size = draw.randint(1, 5)
        groups, tokens = [*groups, tokens[:size]], tokens[size:]
    return groups


def tokens_of(codec, draw, most):
    """Tokens of the sample, or any others, or the same one again and again."""
    count, kind = draw.randint(0, most), draw.choice(["sample", "any", "one", "few"])
    some = codec.encode(SAMPLE) if not isinstance(codec, Ids) else [3, 14, 159]
    if kind == "sample":
        begin = draw.randint(0, len(some))
        return (some[begin:] + some * (count // len(some) + 1))[:count]
    pool = [draw.randrange(codec.vocab_size) for _ in range({"any": count, "one": 1, "few": 3}[kind])]
    return [draw.choice(pool) for _ in range(count)] if pool else []


@given(draw=st.randoms(use_true_random=False))
@examples(150)
def test_the_pieces_are_the_whole_decode_without_the_prompt(codec, draw):
    prompt, tokens = tokens_of(codec, draw, 30), tokens_of(codec, draw, 60)
    whole, known = codec.decode([*prompt, *tokens]), codec.decode(prompt)
    want = whole[len(commonprefix((whole, known))) :]
    assert text_of(codec, prompt, [[token] for token in tokens])[0] == want
    assert text_of(codec, prompt, grouped(tokens, draw))[0] == want
    assert Text(codec, prompt=prompt).add(tokens, True) == want


@given(draw=st.randoms(use_true_random=False))
@examples(150)
def test_a_stop_string_ends_a_text_however_its_tokens_come(codec, draw):
    prompt, tokens = tokens_of(codec, draw, 12), tokens_of(codec, draw, 30)
    plain, stops = text_of(codec, prompt, [tokens])[0], []
    for _ in range(draw.randint(1, 4)):
        begin = draw.randrange(len(plain)) if plain else 0
        stops.append(plain[begin : begin + draw.randint(1, 4)] or "x")
    text, one_by_one = text_of(codec, prompt, [[token] for token in tokens], stops)
    for groups in (grouped(tokens, draw), [tokens]):
        again, together = text_of(codec, prompt, groups, stops)
        assert (again, together.tokens) == (text, one_by_one.tokens)
        assert together.has_stopped == one_by_one.has_stopped
    assert plain.startswith(text)
    assert not any(stop in text for stop in stops)
    assert one_by_one.has_stopped == any(stop in plain for stop in stops)


def test_the_first_complete_stop_ends_the_text_and_its_tokens():
    for groups in ([b"xabcdabcd"], [b"xab", b"cdabcd"], [[byte] for byte in b"xabcdabcd"]):
        text, answer = text_of(Bytes(), (), groups, ("bc", "abcd"))
        assert (text, answer.tokens, answer.has_stopped) == ("xa", list(b"xabc"), True)


def test_a_text_is_decoded_by_a_few_tokens_at_a_time():
    class Counting(Bytes):
        decoded = 0

        def decode(self, ids):
            self.decoded += len(ids)
            return super().decode(ids)

    for token in (65, 0x80, 0xE6):  # also what is no text
        codec = Counting()
        text_of(codec, (), [[token]] * 2000)
        assert codec.decoded < 20 * 2000


def test_too_few_tokens_before_a_new_one_are_seen(monkeypatch):
    tokens = list("日本".encode()) * 4
    assert text_of(Bytes(), (), [tokens])[0] == "日本" * 4
    monkeypatch.setattr(text_module, "CONTEXT", 1)
    assert text_of(Bytes(), (), [tokens])[0] != "日本" * 4
