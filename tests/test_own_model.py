"""docs/your_own_model.md: every program on it trains as the one-process script does, and is as long as it says."""

import ast
import re
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import minipar
from tests.page_programs import FENCE, applied, changes_of, printed
from tests.programs import Program
from tests.strategies import assert_equal_to

TEXT = (Path(__file__).parent.parent / "docs" / "your_own_model.md").read_text()
(SCRIPT,) = (block for _, language, block in FENCE.findall(TEXT) if language == "python")
CHANGES = changes_of(TEXT)
AUTOCAST = """\
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
"""


@pytest.fixture(autouse=True)
def default_dtype():
    """Give back what the script sets."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def program(section: str, who: str = "minipar", number: int = 0) -> str:
    """Return the program that a diff of a section makes, the first or a later one of `who`."""
    if who == "one process" or not section:
        return applied(of(section, "one process").diff, SCRIPT) if section else SCRIPT
    change = of(section, who, number)
    if change.on is None:
        return applied(change.diff, SCRIPT)
    return applied(change.diff, program(section, "one process") if not change.on else program(change.on, who))


def of(section: str, who: str, number: int = 0):
    return [change for change in CHANGES if (change.section, change.who) == (section, who)][number]


def losses(out: str) -> list[float]:
    """Return the losses of all lists in an output, one after another. Pipelines have them on some ranks only."""
    # Not line by line: two ranks may print into each other's line.
    lists = [ast.literal_eval(found) for found in re.findall(r"\[(?:None|\d)[^\[\]]*\]", out)]
    return [loss for of_rank in lists for loss in of_rank if loss is not None]


@cache
def losses_of(script: str) -> list[float]:
    return losses(printed(script))


def require_losses(out: str, rtol: float = 1e-10, of_script: str = SCRIPT) -> None:
    want = losses_of(of_script)
    assert want[-1] < 0.9 * want[0]
    got = losses(out)
    assert len(got) % len(want) == 0
    assert got
    for i, loss in enumerate(got):
        expected = torch.tensor(want[i % len(want)], dtype=torch.float64)
        assert_equal_to(torch.tensor(loss, dtype=torch.float64), expected, rtol, what=f"loss {i}")


EXACT = ["DDP", "ZeRO-1", "FSDP", "Tensor parallelism", "Tensor and pipeline parallelism"]


@pytest.mark.parametrize("section", EXACT)
def test_every_strategy_has_the_losses_of_the_script(section):
    require_losses(printed(program(section)))


ON_TOP = {
    "DDP": (
        ("Pipeline([stage],", 'Pipeline([minipar.DDP(stage, mesh.comm("dp"))],'),
        ("        loss = pipeline.step(", "        loss = pipeline.step("),
    ),
    "ZeRO-1": (
        (
            "torch.optim.AdamW(stage.parameters(), lr=0.01)",
            'minipar.ZeroOptimizer(stage.named_parameters(), torch.optim.AdamW, mesh.comm("dp"), lr=0.01)',
        ),
        (
            "        loss = pipeline.step(",
            "        with optimizer.no_sync():\n            loss = pipeline.step(",
        ),
        ("clip_grad_norm_(stage.parameters()", "clip_grad_norm_(optimizer.shards"),
        ("        minipar.clip", "        optimizer.synchronize()\n        minipar.clip"),
    ),
}


@pytest.mark.parametrize("wrapper", ON_TOP)
def test_data_parallelism_goes_on_top_of_pipelines(wrapper):
    source = program("Tensor and pipeline parallelism")
    for old, new in (
        ("pp=2, tp=2", "pp=2, dp=2"),
        (
            "    for tokens in loader:\n",
            "    for tokens in loader:\n        tokens = tokens.chunk(2)[mesh.coordinates.dp]\n",
        ),
        ("loss.item()", 'mesh.comm("dp").all_reduce(loss, "mean").item()'),
        *ON_TOP[wrapper],
    ):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    require_losses(printed(source))


def test_a_strategy_that_forgets_a_changed_line_has_others():
    """The comparison would see a sampler that deals nothing out, and a clip by the norm of one rank's part."""
    with pytest.raises(AssertionError):
        require_losses(printed(program("DDP").replace("world.size, world.rank, shuffle", "1, 0, shuffle")))
    wrong = program("FSDP").replace("(model.parameters(), 1.0, world)", "(model.parameters(), 0.1, world)")
    with pytest.raises(AssertionError):
        require_losses(printed(wrong))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_mixed_precision_is_near_the_script(number):
    require_losses(printed(program("Mixed precision", number=number)), rtol=0.02)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("section", EXACT[:4])
def test_autocast_is_near_the_script(section):
    source = program(section)
    line = AUTOCAST.splitlines(True)[1][4:]
    assert line in source
    require_losses(printed(source.replace(line, AUTOCAST)), rtol=0.02)


def saved_and_resumed(section: str) -> tuple[str, str]:
    """Return the two halves of the program of "Saving and resuming", with the strategy of another section."""
    source = program(section).replace("world_size=4)[-1]", "world_size=2)[0]")
    source = applied(of("Saving and resuming", "minipar").diff, source)
    before, first, second = re.fullmatch(r"(.*)^(print\(.+\)\n)(print\(.+\)\n)", source, re.M | re.S).groups()
    if section == "Tensor and pipeline parallelism":  # always on four ranks, and the last one has the losses
        before = before.replace("dcp.parameter_parts(model)", "dcp.parameter_parts(stage)")
        first, second = (re.sub(r"world_size=.*", "world_size=4)[-1])", line) for line in (first, second))
    return before + first, before + second


def test_what_two_ranks_saved_four_ranks_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    require_losses("".join(map(printed, saved_and_resumed("FSDP"))))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("saves", "resumes"),
    [
        ("DDP", "Tensor parallelism"),
        ("FSDP", "Tensor and pipeline parallelism"),
        ("Tensor parallelism", "ZeRO-1"),
        ("ZeRO-1", "DDP"),
        ("Tensor and pipeline parallelism", "FSDP"),
    ],
)
def test_another_strategy_resumes_what_one_saved(saves, resumes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    require_losses(printed(saved_and_resumed(saves)[0]) + printed(saved_and_resumed(resumes)[1]))


def test_one_file_is_a_state_dict_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    require_losses(printed(program("Saving and resuming", number=1)))
    names = {}
    exec(
        SCRIPT.replace("    return losses\n", "    return model\n").replace(
            "print(train())", "model = train()"
        ),
        names,
    )
    stored = torch.load("model.pt")
    assert stored.keys() == names["model"].state_dict().keys()
    for name, value in names["model"].state_dict().items():
        if not name.endswith(".k.bias"):  # its gradient is zero, so Adam's steps are of rounding errors
            assert_equal_to(stored[name], value, 1e-8, 1e-8, what=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("who", ["minipar, FSDP", "minipar, tensor parallelism"])
def test_hugging_faces_llama_has_the_losses_of_one_process(who):
    pytest.importorskip("transformers")
    section = "Hugging Face's models"
    require_losses(printed(program(section, who)), rtol=1e-5, of_script=program(section, "one process"))


def test_the_pages_training_is_verified():
    source = program("Is it right?")
    assert printed(source).endswith("dp=2: the numbers of one process\n")
    wrong = source.replace("model = minipar.DDP(model, world)", "pass")
    assert "nobody averages them" in printed(wrong)


# torch's and accelerate's ---------------------------------------------------------------------------------------------

OTHERS = [
    change
    for change in CHANGES
    if change.who == "torch"
    and change.section != "Saving and resuming"
    or (change.who, change.section) == ("accelerate", "DDP")
]


def in_torchs_world(world, sources):
    """Run programs on the process group that the pool has, which is of its size."""
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        return [printed(source) for source in sources]


def test_torchs_programs_have_the_losses_of_the_script():
    minipar.shutdown()  # so that the next pool, whose group torch takes, has two ranks
    sources = [program(section, "torch") for section in ("DDP", "ZeRO-1", "FSDP")]
    for outs in minipar.run(in_torchs_world, sources, world_size=2):
        for out in outs:
            require_losses(out)


def torchrun(tmp_path, source: str, *words: str, ranks: int = 2) -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    status, out, err = Program(tmp_path, source, launcher=launcher, words=words).finish()
    assert status == 0, err
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("change", OTHERS, ids=lambda change: f"{change.who}, {change.section}")
def test_others_programs_have_the_losses_of_the_script(change, tmp_path):
    if change.who == "accelerate":
        pytest.importorskip("accelerate")
    out = torchrun(
        tmp_path, program(change.section, change.who), ranks=4 if "pipeline" in change.section else 2
    )
    require_losses(out, rtol=0.02 if change.section == "Mixed precision" else 1e-10)


@pytest.mark.thorough
def test_torch_resumes_what_it_saved(tmp_path):
    source = program("Saving and resuming", "torch")
    first = losses(torchrun(tmp_path, source, "0", "3"))
    rest = losses(torchrun(tmp_path, source, "3", "5", ranks=4))
    require_losses(str(first[:3] + rest[:2]))


@pytest.mark.thorough
def test_under_torchrun_the_losses_are_those_of_the_script(tmp_path):
    require_losses(torchrun(tmp_path, program("Under torchrun")))


# What the page says of them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.who}, {change.section}")
def test_a_diff_has_as_many_new_lines_as_the_page_says(change):
    assert change.num_lines == change.told
    assert program(change.section, change.who)


def test_the_table_has_the_counts_of_the_diffs():
    (header, *rows) = re.findall(r"^\| (.*) \|$", TEXT, re.M)
    names = [name.strip() for name in header.split("|")][1:]
    assert names == ["minipar", "torch", "accelerate"]
    assert [row.split(" | ")[0] for row in rows if " | " in row] == [
        *EXACT,
        "Mixed precision",
        "Saving and resuming",
    ]
    for row in rows:
        section, *cells = row.split(" | ")
        for who, cell in zip(names, cells):
            found = [change.told for change in CHANGES if (change.section, change.who) == (section, who)]
            assert cell == (str(found[0]) if found else "-"), row


def test_the_page_says_which_accelerate_was_seen():
    accelerate = pytest.importorskip("accelerate")
    assert f"accelerate {'.'.join(accelerate.__version__.split('.')[:2])}" in TEXT
