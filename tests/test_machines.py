"""Two machines, for real: hosts of their own, joined by a slow link whose bytes are counted.

Nothing here asserts a time: a loaded machine may take any. Bytes over the link are asserted, for they are the same
whatever else runs: what the ledgers say was sent from host to host, and on top of it what TCP and gloo add. Times are
printed (`pytest -s`).
"""

import json
from collections import Counter

import pytest

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.train import train
from minipar.train.node_warning import sent_bytes
from tests.across_hosts import CONFIG, ELEMS, STEPS
from tests.hosts import DEVICE, TwoHosts, why_not

pytestmark = pytest.mark.namespaces

TRAIN = (
    *("train", "--dp", "2", "--tp", "2", "--steps", "6", "--batch-size", "4", "--seq-len", "32"),
    *("--model.dim", "32", "--model.num-layers", "2", "--model.num-heads", "2", "--model.max-seq-len", "32"),
    *("--dtype", "float64", "--verify-steps", "0"),
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = TwoHosts(tmp_path_factory.mktemp("hosts"), rate="100mbit")
    try:
        made.__enter__()
    except OSError as error:
        pytest.skip(f"hosts cannot be made here: {error}")
    try:
        yield made
    finally:
        made.__exit__()


@pytest.fixture(scope="module")
def one_host(tmp_path_factory) -> list[tuple]:
    """Loss and gradient norm of each step, on local ranks."""
    model = ModelConfig(dim=32, num_layers=2, num_heads=2, max_seq_len=32)
    options = dict(
        model=model, dp=2, tp=2, steps=6, batch_size=4, seq_len=32, dtype="float64", verify_steps=0
    )
    metrics = train(TrainConfig(**options, out=tmp_path_factory.mktemp("one host"))).metrics
    return [(line["loss"], line["grad_norm"]) for line in metrics]


def losses(folder) -> dict[int, tuple]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


@pytest.mark.thorough
def test_training_on_two_hosts_gives_the_losses_of_one(hosts, one_host, tmp_path):
    hosts.torchrun("-m", "minipar", *TRAIN, "--out", str(tmp_path))
    assert losses(tmp_path) == dict(enumerate(one_host))


@pytest.mark.thorough
def test_when_a_rank_is_killed_both_hosts_restart_and_resume(hosts, one_host, tmp_path):
    out = tmp_path / "run"
    resuming = ("--out", str(out), "--resume", str(out), "--checkpoint-every", "2")
    hosts.torchrun("-m", "tests.train.mortal", str(tmp_path), "3:5", *TRAIN, *resuming, restarts=2)
    lives = Counter((tmp_path / "updates.txt").read_text().splitlines())
    assert lives["0 3"] == 5
    assert lives["1 3"] in (2, 4)  # from the checkpoint after 2 or 4 of the 6 steps
    after = losses(out)
    assert max(after) == 5
    assert after.items() <= dict(enumerate(one_host)).items()


@pytest.fixture(scope="module")
def counted(hosts, tmp_path_factory):
    """What tests/across_hosts.py found, for each of the four ranks; 0 and 1 are on one host, 2 and 3 on the other."""
    file = tmp_path_factory.mktemp("counted") / "found.json"
    hosts.torchrun("-m", "tests.across_hosts", DEVICE, str(file))
    return json.loads(file.read_text())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "vectors"),
    [
        ("ring", 2 * 3 / 4),  # 2(p-1)/p, by the one rank of each host whose neighbour is on the other
        ("hierarchical", 2 * (2 * 1 / 2) / 2),  # 2(k-1)/k of half a vector, by each of the two ranks
        (
            "hierarchical, hosts mistaken",
            2 * 2 * 1 / 2,
        ),  # a fault: "inside" is across, (g-1)/g there and back
    ],
)
def test_an_all_reduce_takes_over_the_link_what_its_formula_says(counted, algorithm, vectors):
    for host in hosts_of(counted):
        print(f"{algorithm}: {host[algorithm]['bytes']:,} bytes, {host[algorithm]['seconds']:.3f} s")
        assert_over_link(host[algorithm]["bytes"], vectors * ELEMS * 4)


@pytest.mark.thorough
def test_a_hierarchical_all_reduce_saves_a_third_of_link_bytes(counted):
    for host in hosts_of(counted):
        ratio = host["hierarchical"]["bytes"] / host["ring"]["bytes"]
        assert ratio == pytest.approx(2 / 3, abs=0.05)
        print(
            f"hierarchical / flat ring: {host['hierarchical']['seconds'] / host['ring']['seconds']:.2f} of its time"
        )


@pytest.mark.thorough
def test_tp_inside_a_host_leaves_the_link_to_gradients(counted):
    """The same mesh, model and batch: only which ranks are neighbours differs."""
    sent = sent_bytes(CONFIG, CONFIG.mesh_sizes)
    tp, gradients = sent["tp"], sent["dp"]
    for rank in counted:
        for placed in ("tp inside", "tp across"):
            assert rank[placed]["tp"] == STEPS * tp
            assert rank[placed]["dp"] == pytest.approx(STEPS * gradients, rel=0.01)
    for host in hosts_of(counted):
        assert_over_link(host["tp inside"]["bytes"], 2 * host["tp inside"]["dp"])  # of two ranks
        assert_over_link(host["tp across"]["bytes"], 2 * host["tp across"]["tp"])
        for placed in ("tp inside", "tp across"):
            print(f"{placed}: {host[placed]['bytes']:,} bytes, {host[placed]['seconds']:.3f} s")


def hosts_of(counted) -> list[dict]:
    """As the first rank of each host saw it."""
    return counted[::2]


def assert_over_link(num_bytes: int, payload: float) -> None:
    """Every byte of the payload, and up to 15 % more: headers, acknowledgements, barriers, a step's few scalars."""
    assert payload <= num_bytes <= 1.15 * payload
