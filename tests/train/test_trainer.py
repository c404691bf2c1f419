"""The main job: the same numbers as one process, and everything it promises to leave behind."""

import json

import pytest

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.support.trace import DATA
from minipar.train import train
from minipar.train.data.text import load_text
from minipar.train.reference import compare, train_in_one_process

SMALL = ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=32, dropout=0.1, tie_embeddings=True)


def config(tmp_path, **changes):
    defaults = dict(
        model=SMALL,
        batch_size=8,
        seq_len=32,
        steps=6,
        verify_steps=4,
        warmup=2,
        dtype="float64",
        out=tmp_path,
    )
    return TrainConfig(**defaults | changes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dp", "microbatches"), [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_every_number_of_ranks_gives_the_numbers_of_one_process(tmp_path, dp, microbatches):
    difference = train(config(tmp_path, dp=dp, microbatches=microbatches)).difference
    assert difference.steps == 4
    assert difference.loss < 1e-12
    assert difference.grad_norm < 1e-6  # the norm is reported in float32
    assert difference.parameter < 1e-11


def test_a_run_leaves_metrics_a_trace_and_a_sample(tmp_path):
    told = []
    result = train(config(tmp_path, dp=2, trace_steps=2), lambda what, metrics: told.append(what))
    assert told == ["train"] * 6 + ["verify"] * 4
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    assert {"loss", "grad_norm", "lr", "tokens_per_s"} <= lines[0].keys()
    assert lines[-1]["loss"] < lines[0]["loss"] < 6
    assert all(0 < line["data_wait_s"] < line["seconds"] for line in lines)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"].split()[0] for event in events if event["ph"] == "X"}
    assert {"F", "B", "optimizer", "all_reduce"} <= names
    assert set(result.traces) == {0, 1}
    for spans in result.traces.values():
        assert [s.kind for s in spans if s.name == DATA] == ["wait"] * 2  # one for each traced step
        assert spans[0].name == DATA
    assert (tmp_path / "sample.txt").read_text().startswith("The ")
    assert not list(tmp_path.glob(".*"))


def test_seed_and_batch_decide_the_run_and_a_wrong_one_is_seen(tmp_path):
    text = load_text(None)
    run = train_in_one_process(config(tmp_path), text, 3)
    assert compare(run, train_in_one_process(config(tmp_path), text, 3))[1:4] == (0, 0, 0)
    other = compare(run, train_in_one_process(config(tmp_path, seed=1), text, 3))
    assert other.loss > 1e-3
    assert other.parameter > 1e-3


def test_bad_input_is_refused_before_any_rank_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "minipar.train.trainer.run", lambda *args, **kwargs: pytest.fail("a rank was started")
    )
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        train(config(tmp_path, text=empty))
    with pytest.raises(ValueError, match="cannot be written"):
        train(config(tmp_path, out=empty / "runs"))
    short = tmp_path / "short"
    short.write_bytes(b"x" * 32)
    with pytest.raises(ValueError, match="fewer than one sample"):
        train(config(tmp_path, text=short))
