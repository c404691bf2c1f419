"""When compressed gradients pay, by formula: over a slow link they do, over NVLink they do not."""

import json

import pytest

import minipar
from minipar.config.choices import AVERAGINGS
from minipar.cost.layout import Implementation, Job, parse_layout
from minipar.cost.machines import find_machine
from minipar.cost.model_table import find_model
from minipar.cost.plan_command import plan_command
from minipar.cost.ranks import held_by, held_elems
from minipar.cost.traffic import gradients_bytes, root_gathers
from minipar.extras.compress import CompressedMean, Int8, PlainMean, Sign, TopK
from minipar.extras.compress.choices import Method
from minipar.extras.cost.compression import (
    CODECS,
    compressed_gradients,
    compression_rows,
    methods_for,
)
from tests.extras.compress.test_compress import vector

SLOW = """
peak_flops = 312e12
matmul_fraction = 0.87
memory_bytes = 80e9
hbm_bytes_per_s = 2.0e12
gpus_per_node = 1
link_bytes_per_s = 300e9
cards_per_node = 1
card_bytes_per_s = 1.25e9
"""
LAYOUT = "dp8-zero0-mb1-full"


METHODS = {name for name, choice in AVERAGINGS.usable().items() if isinstance(choice, Method)}


def advice(machine: str, compress: str = "auto", layout: str = LAYOUT, **options) -> str:
    options |= dict(view="compression", view_options={"method": compress})
    return plan_command("llama-7b", 8, machine, 1024, 64, explain=layout, **options).text


def test_signs_pay_over_ten_gigabits_and_not_over_nvlink(tmp_path):
    slow = tmp_path / "slow.toml"
    slow.write_text(SLOW)
    assert "compress: yes, " in advice(str(slow))
    assert "compress: no, " in advice("h100")
    assert "one data-parallel rank" in advice(str(slow), layout="pp8-mb8-full")
    assert "compress: yes, " in advice(str(slow), layout="dp8-zero3-mb1-full")
    assert "needs whole" in advice(str(slow), "diloco", layout="dp8-zero3-mb1-full")
    rows = json.loads(advice(str(slow), as_json=True))["compress"]
    assert rows["none"]["seconds"] > 2 * rows["sign"]["seconds"]
    assert rows["none"]["sent_bytes"] > 10 * rows["sign"]["sent_bytes"]
    assert list(json.loads(advice(str(slow), "sign", as_json=True))["compress"]) == ["none", "sign"]


def test_an_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean powersgd"):
        advice("h100", "power-sgd")


def test_the_table_has_every_method_of_training():
    assert set(CODECS) == METHODS, "add the new method to CODECS of minipar/extras/cost/compression.py"
    assert set(methods_for(parse_layout(LAYOUT))) == METHODS
    assert "onebit-adam" not in methods_for(parse_layout("dp8-zero1-mb1"))
    codecs = {name for name in METHODS if AVERAGINGS[name].averages == "gradient"}
    for zero in (2, 3):
        assert set(methods_for(parse_layout(f"dp8-zero{zero}-mb1"))) == codecs
    for how in (Implementation(reduce_every="microbatch"), Implementation(replicate=2)):
        assert methods_for(parse_layout("dp8-zero3-mb1"), how) == []


def test_zero_3_gathers_weights_beside_compressed_gradients():
    job = Job(find_model("llama-7b"), find_machine("h100"), 8, 1024, 64)
    layout = parse_layout("dp8-zero3-mb8")
    (_, _, plain), (_, _, int8) = compression_rows(job, layout, "int8")
    held = sum(held_elems(job, layout, held_by(job, layout, 0)))
    weights = sum(root_gather_and_layers(job, layout, held)) * job.bytes_of.weight
    assert plain == pytest.approx(7 / 8 * (weights + held * job.bytes_of.gradient))
    assert int8 == pytest.approx(7 / 8 * (weights + 2 * held * (1 + 4 / 256))), "means go to all"


def root_gather_and_layers(job, layout, held):
    """The elements of the root, gathered once, and of the layers, gathered before the forward and before the backward."""
    ((root, gathers),) = root_gathers(job, layout, held_by(job, layout, 0))
    return gathers * root, 2 * (held - root)


@pytest.mark.parametrize(("name", "codec"), [("sign", Sign(256)), ("int8", Int8()), ("topk", TopK(0.01))])
def test_the_bytes_are_those_that_ranks_send(name, codec):
    n, p = 256 * 200, 2
    job = Job(find_model("llama-7b"), find_machine("h100"), p, 1024, 64, "float32")

    def sent(world):
        counts = []
        for send in (
            lambda x: CompressedMean(world, codec)(x),
            lambda x: PlainMean(world).means({0: x}),
        ):
            world.traffic.reset()
            send(vector(n, world.rank))
            counts.append(world.traffic.sent_bytes)
        return counts

    for to_all, plain in minipar.run(sent, world_size=p):
        for layout in (parse_layout("dp2-mb1"), parse_layout("dp2-zero2-mb1")):
            found = compressed_gradients(job, layout, (n, 0), name).sent_bytes
            assert found == pytest.approx(to_all, rel=0.01)
        assert plain == 2 * (p - 1) / p * 4 * n
    assert gradients_bytes(job, layout, 0)[0] > 0
