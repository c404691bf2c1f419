"""`minipar plan` as a user meets it."""

import json
from dataclasses import replace

import pytest

from minipar.cost.doubt import DENSE, PER_DOUBLING
from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import MACHINES, find_machine
from minipar.cost.memory import worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.planner import Candidate, Plan, plan
from minipar.cost.ranks import bucket_elems
from minipar.cost.reasons import why_nots
from minipar.cost.report import plan_text, run_lines
from minipar.cost.stages import unplanned
from tests.cli.test_cli import outcome
from tests.cost.printed_commands import config_of

SMALL = ["--model", "llama-7b", "--gpus", "8", "--machine", "h100", "--batch", "32"]
MINE = """
peak_flops = 1e14
matmul_fraction = 0.8
memory_bytes = 4e10
hbm_bytes_per_s = 1e12
gpus_per_node = 4
link_bytes_per_s = 1e11
cards_per_node = 1
card_bytes_per_s = 1e10
"""


def test_a_plan_is_printed_with_reasons_and_commands_and_drawn(capsys, tmp_path):
    picture = tmp_path / "plan.svg"
    code, out, _ = outcome(capsys, "plan", *SMALL, "--run", "--top", "3", "--picture", str(picture))
    assert code == 0
    assert "llama-7b (6.74 B parameters) on 8 x h100, 32 samples of 4096 tokens a step" in out
    assert "why not, instead of" in out
    assert "fit 75 GB, which leaves 5 GB free" in out
    assert out.splitlines()[-2].startswith("minipar train --")
    assert out.splitlines()[-1].startswith("torchrun --nnodes 1 --nproc-per-node 8 -m minipar train --")
    assert picture.read_text().startswith("<?xml")


def test_json_has_the_numbers_in_seconds_and_bytes(capsys):
    code, out, _ = outcome(capsys, "plan", *SMALL, "--json")
    values = json.loads(out)
    assert code == 0
    assert 5 <= len(values["best"]) <= 10
    for best in values["best"]:
        assert sum(best["memory"].values()) <= 80e9
        assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    assert {"axis", "value", "lost_s", "excess_bytes"} <= set(values["why"][0])


def test_a_known_program_is_predicted_by_its_own_numbers(capsys):
    layout = ["--explain", "dp64-zero3-mb1-full", "--machine", "a100-80gb", "--batch", "64"]
    seconds = {}
    for program in ("minipar", "torchtitan-eager"):
        code, out, _ = outcome(capsys, "plan", *layout, "--program", program, "--json")
        assert code == 0
        seconds[program] = json.loads(out)["seconds"]
    assert seconds["torchtitan-eager"] > 1.3 * seconds["minipar"]
    _, out, _ = outcome(capsys, "plan", *layout, "--program", "composer")
    assert "as composer would run it" in out
    assert f"+- {DENSE + 3 * PER_DOUBLING:.0%}" in out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("machine", "said"), [("h100", False), ("mi300x", True), ("b200", True)])
def test_a_machine_without_published_runs_is_said_to_have_none(machine, said):
    text = plan_text(plan(Job(MODELS["llama-7b"], MACHINES[machine], 8, 4096, 32)))
    assert (f"no dense run on {machine} was compared" in text) == said


@pytest.mark.parametrize(("seq_len", "said"), [(4096, True), (8192, True), (16384, False)])
def test_a_plan_that_splits_short_samples_says_why(seq_len, said):
    job = Job(MODELS["llama-7b"], MACHINES["h100"], 8, seq_len, 8)
    found = Candidate(1.0, 60e9, parse_layout("cp8"), 1.0)
    text = plan_text(Plan(job, 10, [found], {("cp", 8): found}, seen=1, legal=1))
    assert (f"cp=8 for {seq_len:,} tokens: few programs split samples this short" in text) == said


def test_every_why_not_names_another_layout():
    found = plan(Job(MODELS["llama-70b"], MACHINES["h100"], 64, 4096, 128))
    given = [reason.layout for reason in why_nots(found)]
    assert len(given) == len(set(given)) >= 4
    assert found.choice.layout not in given


def test_a_layout_that_recomputes_says_what_fused_norms_would_keep():
    """Llama 3 405B trained without recomputation: 30 GB less activations, with norms and SwiGLU fused."""
    job = Job(MODELS["llama3-405b"], MACHINES["h100"], 16384, 8192, 2048, margin_bytes=5e9)
    found = plan(job)
    assert found.choice.layout.cp == 1
    (why,) = [reason for reason in why_nots(found) if reason.axis == "recompute"]
    assert why.value == "none"
    assert "GB too much" in why.text
    assert "where norms and SwiGLU are fused, as --program llama-3 has them" in why.text


@pytest.mark.parametrize(
    ("margin", "legal"), [(0, True), (79.9, True), (-0.1, False), (80, False), (1e3, False)]
)
def test_a_margin_is_at_least_0_and_less_than_the_memory(capsys, margin, legal):
    layout = [
        "--model",
        "llama-7b",
        "--gpus",
        "8",
        "--machine",
        "h100",
        "--batch",
        "8",
        "--explain",
        "dp8-zero3",
    ]
    code, out, err = outcome(capsys, "plan", *layout, "--margin", str(margin))
    assert code == (0 if legal else 2)
    assert legal or (out, err.count("\n")) == ("", 1)
    assert legal or f"margin={margin:g} GB of 80 GB; use 0 or more, less than the memory" in err


def test_one_layout_is_itemised_against_the_card(capsys):
    code, out, _ = outcome(capsys, "plan", "--explain", "dp4-pp2-tp8")
    job = Job(MODELS["llama-70b"], MACHINES["a100-80gb"], 64, 4096, 1024)
    _, items = worst_rank_memory(job, parse_layout("dp4-pp2-tp8"))
    assert code == 0
    assert f"{sum(items.values()) / 1e9 - 75:.1f} GB too much" in out  # 5 GB of 80 are left free
    assert f"{items['optimizer state'] / 1e9:.2f} GB" in out
    code, out, _ = outcome(capsys, "plan", "--explain", "dp4-pp2-tp8-zero1", "--json")
    assert json.loads(out)["fullest_pp_rank"] == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--view", "no-such-view"], "view='no-such-view' is unknown"),
        (["--model", "lama-70b"], "did you mean llama"),
        (["--machine", "a100"], "did you mean a100-40gb or a100-80gb"),
        (["--gpus", "0"], "gpus=0; use a whole number of 1 or more"),
        (["--seq", "-4"], "seq=-4"),
        (["--batch", "0"], "batch=0"),
        (["--precision", "fp8"], "precision='fp8' is unknown"),
        (["--program", "megatron"], "program='megatron' is unknown; use"),
        (["--explain", "dp4-pp3"], "12 ranks, and there are gpus=64"),
        (["--explain", "everything"], "cannot be read"),
        (["--top", "0"], "top=0"),
        (["--gpus", "8", "--machine", "v100"], "GB too much"),
        (["--machine", "no/such.toml"], "No such file"),
        ([*SMALL, "--machine", "tpu-v5p", "--run"], "machine=tpu-v5p runs no torchrun; leave out --run"),
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


@pytest.mark.thorough
def test_a_machine_of_ones_own(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    code, out, err = outcome(capsys, "plan", *SMALL, "--machine", str(path), "--seq", "1024")
    assert code == 0, err
    assert "on 8 x mine" in out
    path.write_text(MINE.replace("cards_per_node", "card_per_node"))
    code, _, err = outcome(capsys, "plan", *SMALL, "--machine", str(path))
    assert code == 2
    assert "'card_per_node' is no field; use" in err
    assert "did you mean cards_per_node?" in err


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-7b", "dp2-pp2-tp2-zero1-mb2-full"),
        ("llama-7b", "dp2-pp4-interleaved:2-zero2"),
        ("llama-7b", "cp4-pp2-zb-v-zero3"),
        ("llama-7b", "cp4-ulysses-pp2-dualpipe-v-every:4"),
        ("llama-7b", "dp2-pp4-zb-auto-zero1"),
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
    if layout.dp * layout.cp > 1 and layout.zero < 3:
        assert config.bucket_mb * 2**20 == pytest.approx(2 * bucket_elems(job, layout), rel=1e-5)
    assert (config.batch_size, config.seq_len, config.dtype) == (32, 4096, "bfloat16")
    assert config.model.num_layers == job.shape.num_layers
    assert config.model.num_experts == job.shape.num_experts
    assert config.sequence_parallel == (layout.tp > 1)
    assert not config.model.parallel_block
    parallel = replace(job, shape=replace(job.shape, parallel_block=True))
    assert config_of(run_lines(parallel, layout)[0]).model.parallel_block


def test_the_help_names_everything_that_is_not_planned(capsys):
    _, out, _ = outcome(capsys, "plan", "--help")
    _, _, not_planned = " ".join(out.replace("│", " ").split()).partition("does not cover ")
    assert [name for name in unplanned() if name not in not_planned] == []


def test_this_machine_is_read_from_its_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run `minipar calibrate local.toml`"):
        find_machine("local")
    (tmp_path / "local.toml").write_text(MINE)
    assert find_machine("local").name == "local"
    code, out, _ = outcome(capsys, "plan", *SMALL, "--machine", "local", "--seq", "1024")
    assert code == 0
    assert "on 8 x local" in out
