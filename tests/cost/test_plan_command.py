"""`minipar plan` as a user meets it."""

import json
import shlex
from dataclasses import fields, replace

import pytest

from minipar import cli
from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.report import run_lines
from minipar.cost.slices import sizes_of
from minipar.cost.stages import UNPLANNED
from minipar.model import ModelConfig
from minipar.train import TrainConfig
from minipar.train.slicing import slice_sizes
from tests.test_cli import outcome

SMALL = ["--model", "llama-7b", "--gpus", "8", "--machine", "h100", "--batch", "32"]


def test_a_plan_is_printed_with_reasons_and_commands_and_drawn(capsys, tmp_path):
    picture = tmp_path / "plan.svg"
    code, out, _ = outcome(capsys, "plan", *SMALL, "--run", "--top", "3", "--picture", str(picture))
    assert code == 0
    assert "llama-7b (6.74 B parameters) on 8 x h100, 32 samples of 4096 tokens a step" in out
    assert "why the others lost to" in out
    assert out.splitlines()[-2].startswith("minipar train --")
    assert out.splitlines()[-1].startswith("torchrun --nnodes 1 --nproc-per-node 8 -m minipar train --")
    assert picture.read_text().startswith("<?xml")


def test_json_has_the_numbers_in_seconds_and_bytes(capsys):
    code, out, _ = outcome(capsys, "plan", *SMALL, "--json")
    values = json.loads(out)
    assert code == 0
    assert len(values["best"]) == 10
    for best in values["best"]:
        assert sum(best["memory"].values()) <= 80e9
        assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    assert {"axis", "value", "lost_s", "excess_bytes"} <= set(values["why"][0])


def test_one_layout_is_itemised_against_the_card(capsys):
    code, out, _ = outcome(capsys, "plan", "--explain", "dp4-pp2-tp8")
    job = Job(MODELS["llama-70b"], MACHINES["a100-80gb"], 64, 4096, 1024)
    _, items = worst_rank_memory(job, parse_layout("dp4-pp2-tp8"))
    assert code == 0
    assert f"{sum(items.values()) / 1e9 - 80:.1f} GB too much" in out
    assert f"{items['optimizer state'] / 1e9:.2f} GB" in out
    code, out, _ = outcome(capsys, "plan", "--explain", "dp4-pp2-tp8-zero1", "--json")
    assert json.loads(out)["fullest_pp_rank"] == 0


def test_an_automatic_split_is_printed_as_a_table_of_stages(capsys):
    argv = ["plan", "--model", "llama-7b", "--gpus", "4", "--machine", "h100", "--batch", "8", "--auto-split"]
    code, out, _ = outcome(capsys, *argv)
    assert code == 0
    assert "layout of the stage" in out
    assert "the planner's best, whose stages have one mesh" in out
    code, out, _ = outcome(capsys, *argv, "--json")
    assert sum(stage["gpus"] for stage in json.loads(out)["stages"]) == 4


def test_scaling_is_drawn(capsys, tmp_path):
    picture = tmp_path / "scaling.svg"
    code, _, err = outcome(capsys, "plan", *SMALL, "--explain", "dp8-zero1-full", "--scaling", str(picture))
    assert code == 0
    assert f"wrote {picture}" in err
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--auto-split", "--run"], "leave out --explain and --run"),
        (["--auto-split", "--gpus", "8", "--machine", "v100"], "GB too much"),
        (["--calibrate", "mine.txt"], "use a name that ends in .toml"),
        (["--calibrate", "/dev/null/mine.toml"], "cannot be written"),
        (["--model", "lama-70b"], "did you mean llama"),
        (["--machine", "a100"], "did you mean a100-40gb or a100-80gb"),
        (["--gpus", "0"], "gpus=0; use a whole number of 1 or more"),
        (["--seq", "-4"], "seq=-4"),
        (["--batch", "0"], "batch=0"),
        (["--precision", "fp8"], "precision='fp8' is unknown"),
        (["--explain", "dp4-pp3"], "12 ranks, and there are gpus=64"),
        (["--explain", "everything"], "cannot be read"),
        (["--explain", "dp8-pp8-chimera"], "twice the dp of a V on half the pp"),
        (["--explain", "dp4-pp8-cp2-seq1f1b:4"], "use cp=1, not 2"),
        (["--top", "0"], "top=0"),
        (["--gpus", "8", "--machine", "v100"], "GB too much"),
        (["--machine", "no/such.toml"], "No such file"),
        (["--explain", "dp4-pp2-tp8-zero1", "--picture", "plan.doc"], "plan.doc"),
        (["--explain", "dp4-pp2-tp8-zero1", "--picture", "/dev/null/plan.png"], "cannot be written"),
        (
            ["--model", "gpt3-175b", "--gpus", "1024", "--explain", "dp16-pp8-tp8-zero1", "--run"],
            "leave out --run",
        ),
    ],
)
def test_a_bad_request_is_one_line_and_exit_2(capsys, argv, says):
    code, out, err = outcome(capsys, "plan", *argv)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_machine_of_ones_own(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    text = "peak_flops = 1e14\nmatmul_fraction = 0.8\nmemory_bytes = 4e10\nhbm_bytes_per_s = 1e12\ngpus_per_node = 4\n"
    path.write_text(text + "link_bytes_per_s = 1e11\ncards_per_node = 1\ncard_bytes_per_s = 1e10\n")
    code, out, err = outcome(capsys, "plan", *SMALL, "--machine", str(path), "--seq", "1024")
    assert code == 0, err
    assert "on 8 x mine" in out
    path.write_text(text + "link_bytes_per_s = 1e11\ncard_per_node = 1\ncard_bytes_per_s = 1e10\n")
    code, _, err = outcome(capsys, "plan", *SMALL, "--machine", str(path))
    assert code == 2
    assert "'card_per_node' is no field; use" in err
    assert "did you mean cards_per_node?" in err


def config_of(line: str) -> TrainConfig:
    """The configuration that a printed `minipar train` command describes."""
    words, found = shlex.split(line)[2:], {"": {}, "model": {}}
    types = {f.name: f.type for f in fields(TrainConfig)} | {f.name: f.type for f in fields(ModelConfig)}
    while words:
        prefix, _, name = words.pop(0).removeprefix("--").replace("-", "_").rpartition(".")
        value = words.pop(0) if words and not words[0].startswith("--") else True
        kind = types[name].split()[0]
        read = int if kind == "int" or name == "zero" else float if kind == "float" else lambda word: word
        found[prefix][name] = read(value)
    return TrainConfig(model=ModelConfig(**found["model"]), **found[""])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-7b", "dp2-pp2-tp2-zero1-mb2-full"),
        ("llama-7b", "dp2-pp4-interleaved:2-zero2"),
        ("llama-7b", "cp4-pp2-zb-v-zero3"),
        ("llama-7b", "cp4-ulysses-pp2-dualpipe-v-every:4"),
        ("llama-7b", "dp2-pp4-zb-auto-zero1"),
        ("llama-7b", "dp2-pp4-seq1f1b:8-zero1"),
        ("mixtral-8x7b", "ep2-dp2-pp4-terapipe:4-zero1"),
        ("mixtral-8x7b", "dp2-cp2-ep4-tp2-zero1"),
        ("mixtral-8x7b", "dp4-ep4-tp2-zero1"),
    ],
)
def test_the_printed_command_is_the_layout(model, layout):
    job, layout = Job(MODELS[model], MACHINES["h100"], 8, 4096, 32), parse_layout(layout)
    config = config_of(run_lines(job, layout)[0])
    assert config.mesh_sizes == {axis: getattr(layout, axis) for axis in ("pp", "dp", "cp", "tp", "ep")}
    assert (config.zero, config.schedule, config.recompute) == (
        layout.zero,
        layout.schedule,
        layout.recompute,
    )
    assert config.microbatches == layout.microbatches(job)
    assert config.cp_attention == layout.cp_attention
    assert config.seq_slices == layout.slices
    if layout.slices > 1:
        assert slice_sizes(config) == sizes_of(job, layout.tp, layout.slices)
        assert config.model.attention == job.implementation.attention
    assert (config.batch_size, config.seq_len, config.dtype) == (32, 4096, "bfloat16")
    assert config.model.num_layers == job.shape.num_layers
    assert config.model.num_experts == job.shape.num_experts
    assert config.sequence_parallel == (layout.tp > 1)
    assert not config.model.parallel_block
    parallel = replace(job, shape=replace(job.shape, parallel_block=True))
    assert config_of(run_lines(parallel, layout)[0]).model.parallel_block


def test_the_help_names_everything_that_is_not_planned():
    _, _, said = " ".join(cli.plan_command.__doc__.split()).partition("Not planned: ")
    not_planned = said.partition(" Args:")[0]
    assert [name for name in UNPLANNED if name not in not_planned] == []
