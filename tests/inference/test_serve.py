"""`minipar serve`: a file of requests, each answered with the text of `minipar generate`, or with why not."""

import json
import os
import signal

import pytest

from minipar.cli import main
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.inference import Request, serve
from minipar.inference.engine import Engine
from minipar.inference.requests_file import ResultsFile, read_requests
from minipar.support.errors import RankError
from minipar.train import generate_text, train

LINES = [
    '{"prompt": "The ", "max_new_tokens": 12}',
    '{"prompt": "The ", "max_new_tokens": 12, "temperature": -1}',
    "The prompt is this line",
    "",
    '{"prompt": [84, 104, 101, 32], "max_new_tokens": 5, "arrival_s": 0.001}',
    '{"prompt": "The ", "max_new_tokens": 300}',
    '{"prompt": "A text", "max_new_tokens": 7, "temperature": 0.8, "seed": 3}',
    '{"prompt": "x", "max_new_tokens": 7, "temprature": 0.8}',
    '{"prompt": "x"}',
    "[1, 2]",
    '{"prompt": "", "max_new_tokens": 1}',
    '{"prompt": "The very same beginning, ", "max_new_tokens": 4}',
    '{"prompt": "The very same beginning, ", "max_new_tokens": 9}',
]
ERRORS = {
    1: "line 2: temperature=-1; use a finite number, 0 or more",
    2: "line 3: not JSON: Expecting value at column 1",
    4: "4 tokens of prompt and max_new_tokens=300 exceed max_seq_len=48; shorten one of them",
    6: "line 8: 'temprature' is no field of a request; use prompt, max_new_tokens, temperature,",
    7: "line 9: max_new_tokens is missing",
    8: "line 10: a request is an object of JSON",
    9: "line 11: prompt is empty; give at least one token to continue",
}


def make_run(folder, **model):
    config = TrainConfig(
        model=ModelConfig(max_seq_len=48, **model), batch_size=2, seq_len=16, steps=1, verify_steps=0,
        trace_steps=0, warmup=0, dtype="float64", checkpoint_every=1, out=folder,
    )  # fmt: skip
    train(config)
    return config.folder


SMALL = dict(dim=16, num_layers=2, num_heads=2)
SMALLER = dict(dim=8, num_layers=1, num_heads=1)
EXPERTS = dict(num_experts=4, top_k=2, capacity_factor=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), **SMALL)


@pytest.fixture(scope="module")
def folder_with_experts(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), **SMALL, **EXPERTS)


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(LINES))
    return path


def results_of(out):
    return {
        line["request"]: line for line in map(json.loads, (out / "results.jsonl").read_text().splitlines())
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "words",
    [
        "",
        "--tp 2 --num-drafts 3 --block-size 4 --num-blocks 12 --token-budget 9 --preemption swap",
        "--cp 2 --block-size 4 --num-blocks 12 --token-budget 9 --one-by-one",
        "--prefill-tp 1 --tp 2 --block-size 4 --num-blocks 12 --token-budget 9 --num-drafts 2",
    ],
)
def test_a_file_is_served_and_each_bad_line_is_named(folder, requests, tmp_path, capsys, words):
    main(["serve", str(folder), "--requests", str(requests), "--out", str(tmp_path / "out"), *words.split()])
    printed, results = capsys.readouterr().out, results_of(tmp_path / "out")
    assert len(results) == len(LINES) - 1  # a blank line is no request
    for number, result in results.items():
        assert result.get("error", "").startswith(ERRORS.get(number, ""))
        assert ("error" in result) == (number in ERRORS)
        assert (f"request {number} is not served: {ERRORS.get(number)}" in printed) == (number in ERRORS)
    for number, prompt, length in [(0, "The ", 12), (3, "The ", 5), (11, "The very same beginning, ", 9)]:
        assert prompt + results[number]["text"] == generate_text(folder, prompt, length)
    sampled = generate_text(folder, "A text", 7, temperature=0.8, seed=3)
    assert "A text" + results[5]["text"] == sampled, "one draw for both commands"
    assert results[10]["tokens"] == results[11]["tokens"][:4]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["num_finished"], metrics["num_refused"]) == (5, 1)
    assert metrics["num_tokens"] == 12 + 5 + 7 + 4 + 9
    for picture in ("requests.png", "batching.png"):
        assert (tmp_path / "out" / picture).stat().st_size > 0


def serve_words(folder, requests, out, *words):
    return ["serve", str(folder), "--requests", str(requests), "--out", str(out), "--no-draw", *words]


def on_experts(words):
    return pytest.param("folder_with_experts", "", words, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("run", "both", "other"),
    [
        ("folder", "", "--offload disk"),
        ("folder", "--cache-bits 8", "--tp 2"),
        ("folder", "--weight-bits 8 --offload disk", "--tp 2"),
        ("folder", "--weight-bits 4 --weight-group 8 --cache-bits 4", "--tp 2"),
        *map(on_experts, ["--ep 2", "--ep 2 --tp 2", "--cp 2 --ep 2", "--ep 2 --pp 2"]),
    ],
)
@pytest.mark.sampled(2)
def test_rounded_streamed_and_spread_models_serve_the_same(request, requests, tmp_path, run, both, other):
    for out, words in [("one", both), ("other", f"{both} {other}")]:
        main(serve_words(request.getfixturevalue(run), requests, tmp_path / out, *words.split()))
    assert results_of(tmp_path / "one") == results_of(tmp_path / "other")


def refused(capsys, words) -> str:
    """The one line that a command says which cannot be."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("minipar: ")]
    return line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--offload tape", "offload='tape' is unknown; use none, cpu or disk"),
        (
            "--tp 2 --weight-bits 4 --weight-group 16",
            "weight_group=16: a group of layers.0.attention.o crosses the cut",
        ),
        ("--cp 3", "cp=3 does not divide block_size=16; use 1, 2, 4, 8 or 16"),
        ("--cp 0", "cp=0; use a whole number of 1 or more"),
        ("--ep 2", "ep=2: this model has no experts to spread; use ep=1"),
        ("--prefill-tp 1 --pp 2", "prefill_tp=1 with pp=2; use it with tp alone"),
        ("--prefill-tp 3", "tp=3 does not divide num_heads=2; use 1 or 2"),
        ("--prefill-tp -1", "prefill_tp=-1; use 0 or more"),
        (
            "--num-blocks 100000000000000",
            "more than this machine's memory can hold; use 192 or less",
        ),
        (
            f"--num-blocks {1 << 24} --block-size 1024",
            "num_blocks=16777216 takes 8,796,361,457,664 bytes, more",
        ),
        ("--num-blocks 100000000000000 --max-running 7 --block-size 10", "use 35 or less, which is enough"),
        ("--targets -1 2", "targets=-1.0 2.0; use seconds, 0 or more; inf for none"),
        ("--targets 1 nan", "targets=1.0 nan; use seconds"),
        (
            "--prefill-tp 1 --cache-bits 8",
            "a cache that is rounded, or of latents, is not sent between ranks",
        ),
    ],
)
def test_words_that_cannot_serve_are_one_line(folder, requests, capsys, words, says):
    assert says in refused(capsys, ["serve", str(folder), "--requests", str(requests), *words.split()])


def test_a_service_without_a_served_request_exits_with_1(folder, tmp_path, monkeypatch, capsys):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(['{"prompt": "The ", "max_new_tokens": 300}', "no JSON"]))
    monkeypatch.setattr(serve, "run", lambda *args, **how: pytest.fail("a rank was started"))
    with pytest.raises(SystemExit) as end:
        main(serve_words(folder, path, tmp_path / "out"))
    assert end.value.code == 1
    assert capsys.readouterr().err.endswith("minipar: no request was served\n")
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["num_refused"] == 1


@pytest.mark.parametrize("dies", [False, True])
def test_when_a_rank_fails_what_was_finished_is_written(folder, requests, tmp_path, monkeypatch, dies):
    def fails_later(self, requests, results, iterate=Engine.iterate):
        for plan in iterate(self, requests, results):
            yield plan
            if len(results[1].tokens) == 5:
                if dies and self.stages.ranks.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if not dies:
                    raise RuntimeError("a rank is lost")

    def serve_and_fail(*args, serve_rank=serve._serve_rank):
        Engine.iterate = fails_later
        return serve_rank(*args)

    monkeypatch.setattr(serve, "_serve_rank", serve_and_fail)
    with pytest.raises(RankError, match="SIGKILL" if dies else "a rank is lost"):
        serve.serve_file(folder, requests, tmp_path, serve.Options(), serve.MeshSizes(2 if dies else 1))
    results = results_of(tmp_path)
    assert len(results[3]["tokens"]) == 5 or 10 in results
    assert results[1]["error"] == ERRORS[1]
    assert 0 not in results


def test_a_full_disk_is_one_line_and_what_was_written_stays(folder, requests, tmp_path, monkeypatch, capsys):
    class Full:
        """A disk with room for 1,000 bytes of results."""

        def __init__(self, file):
            self.file = file

        def write(self, data):
            room = 1000 - self.file.tell()
            if room == 0:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:room])

        def truncate(self, size):
            self.file.truncate(size)

        def close(self):
            self.file.close()

    def on_a_full_disk(self, path, begin=ResultsFile.__init__):
        begin(self, path)
        self._file = Full(self._file)

    monkeypatch.setattr(ResultsFile, "__init__", on_a_full_disk)
    said = refused(capsys, serve_words(folder, requests, tmp_path / "out"))
    assert said == f"minipar: {tmp_path}/out/results.jsonl cannot be written: No space left on device"
    results = results_of(tmp_path / "out")  # no line is cut short
    assert {number: line["error"] for number, line in results.items() if "error" in line}.keys() >= {1, 2, 6}
    assert 0 < len(results) < len(LINES) - 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_disk_that_is_full_from_the_start_is_one_line(folder, requests, tmp_path, capsys):
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    said = refused(capsys, serve_words(folder, requests, tmp_path))
    assert "results.jsonl cannot be written: No space left on device" in said


def test_after_an_interrupt_what_was_finished_is_there(folder, requests, tmp_path):
    def interrupt(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve.serve_file(folder, requests, tmp_path, serve.Options(), on_done=interrupt)
    (written,) = results_of(tmp_path).keys() - ERRORS.keys() or [None]
    assert written in (None, 0, 3, 5, 10, 11)


def test_no_draft_changes_a_text(folder, requests, tmp_path):
    texts = []
    smaller = make_run(tmp_path / "smaller", **SMALLER)
    for i, words in enumerate(
        [[], ["--draft", "ngram"], ["--draft", "layers:1", "--tp", "2"], ["--draft", str(smaller)]]
    ):
        main(serve_words(folder, requests, tmp_path / str(i), *words))
        texts.append(results_of(tmp_path / str(i)))
        metrics = json.loads((tmp_path / str(i) / "metrics.json").read_text())
        assert i < 2 or metrics["acceptance_rate"] > 0
    assert all(other == texts[0] for other in texts)


def test_a_draft_that_cannot_be_is_one_line(folder, requests, tmp_path, capsys):
    other = make_run(tmp_path / "other", vocab_size=260, **SMALLER)
    for word, says in [
        ("layers:0", "draft='layers:0'; use layers:K with a whole number K of 1 or more"),
        ("layers:3", "draft='layers:3': the model has num_layers=2; use at most so many"),
        ("no/such/run", "draft='no/such/run' is no run with a whole checkpoint; use ngram, layers:K or"),
        (str(other), f"draft={other} has vocab_size=260, and {folder} has 256; use a run of the same vocab"),
    ]:
        assert says in refused(capsys, serve_words(folder, requests, tmp_path / "out", "--draft", word))


def read(tmp_path, content: bytes):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(content)
    return read_requests(path, lambda text: list(text.encode()))


def test_a_request_of_text_has_the_tokens_of_its_text(tmp_path):
    line = b'{"prompt": "ab", "max_new_tokens": 2, "end_tokens": [10], "top_k": 3}'
    assert read(tmp_path, line) == [Request((97, 98), 2, top_k=3, end_tokens=frozenset({10}))]


def test_a_line_ends_at_a_newline_alone_and_may_be_no_utf8(tmp_path):
    lines = [f'{{"prompt": "{text}", "max_new_tokens": 2}}' for text in ("a\u2028b", "c\x85d", "\u2029")]
    wrong = lines[0].encode().replace(b"a", b"\xff")
    content = b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\n \n" + wrong + b"\n"
    *right, error = read(tmp_path, content)
    assert [bytes(request.prompt).decode() for request in right] == ["a\u2028b", "c\x85d", "\u2029"]
    assert error == "line 5: not UTF-8: invalid start byte at byte 12"


def test_a_line_nested_too_deeply_is_an_error_of_its_own(tmp_path):
    wrong, right = read(tmp_path, b"[" * 100_000 + b'\n{"prompt": [1], "max_new_tokens": 2}')
    assert wrong == "line 1: its values are nested too deeply"
    assert right == Request((1,), 2)
