"""Two machines, for real: hosts of their own, joined by a slow link whose bytes are counted.

Nothing here asserts a time: a loaded machine may take any. Bytes over the link are asserted, for they are the same
whatever else runs: what the ledgers say was sent from host to host, and on top of it what TCP and gloo add. Times are
printed (`pytest -s`).
"""

import json

import pytest

from minipar.model import ModelConfig
from minipar.train import TrainConfig, train
from tests.hosts import TwoHosts, why_not

pytestmark = pytest.mark.namespaces

TINY = ("--model.dim", "32", "--model.num-layers", "2", "--model.num-heads", "2", "--model.max-seq-len", "32")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = TwoHosts(tmp_path_factory.mktemp("hosts"), rate="200mbit")
    try:
        made.__enter__()
    except OSError as error:
        pytest.skip(f"hosts cannot be made here: {error}")
    try:
        yield made
    finally:
        made.__exit__()


def test_training_on_two_hosts_gives_the_losses_of_one(hosts, tmp_path):
    flags = ("--dp", "2", "--tp", "2", "--steps", "4", "--batch-size", "4", "--seq-len", "32")
    there = tmp_path / "two hosts"
    hosts.torchrun(
        "-m",
        "minipar",
        "train",
        *flags,
        *TINY,
        "--dtype",
        "float64",
        "--verify-steps",
        "0",
        "--out",
        str(there),
    )
    model = ModelConfig(dim=32, num_layers=2, num_heads=2, max_seq_len=32)
    here = train(
        TrainConfig(
            model=model, dp=2, tp=2, steps=4, batch_size=4, seq_len=32, dtype="float64", verify_steps=0,
            out=tmp_path / "one host",
        )
    )  # fmt: skip
    lines = [json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [line["loss"] for line in here.metrics]
    assert [line["grad_norm"] for line in lines] == [line["grad_norm"] for line in here.metrics]
