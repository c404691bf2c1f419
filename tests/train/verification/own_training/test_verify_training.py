"""A training by any library is equal to one process or named as wrong, with what is wrong; and bad setups are refused."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import minipar
from minipar.cli import main
from minipar.support.errors import RankError
from tests.train.verification import scripts
from tests.train.verification.own_training import setups
from tests.train.verification.own_training.setups import averaged, mlp, own_part, planned, train

RIGHT = setups.RIGHT | scripts.RIGHT
WRONG = setups.WRONG | scripts.WRONG


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_training_is_not_accused(name):
    mesh, setup = RIGHT[name]
    result = minipar.verify_training(setup, **mesh)
    assert result.equal, str(result)
    assert all(row.tensors for row in result.rows if row.what.startswith(("weights", "gradients")))
    assert not any("nothing tells" in note for note in result.notes)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(name):
    mesh, setup, words = WRONG[name]
    try:
        result = minipar.verify_training(setup, **mesh, steps=4)
        assert not result.equal
        said = str(result)
    except RankError as error:  # the library refuses it, or ranks no longer go together
        said = str(error)
    assert words in said, said


BAD = {  # setup, and words of the one line that refuses it
    "raises": (lambda world, mesh: mlp().to("nowhere"), "setup(None, mesh) raised RuntimeError"),
    "nothing": (lambda world, mesh: None, "setup returned None; return (model, optimizer, step)"),
    "no optimizer": (lambda world, mesh: (mlp(), mlp(), print), "setup returned the optimizer a Sequential"),
    "no loss": (lambda world, mesh: (*train(world, mesh)[:2], lambda: "low"), "step(0) returned a str"),
    "no step": (lambda world, mesh: (*train(world, mesh)[:2], lambda: 0.0), "3 steps called no optimizer's step"),
    "no seed": (
        lambda world, mesh: train(world, mesh, lambda: torch.nn.Sequential(torch.nn.Linear(6, 4)).double()),
        "differs between two calls in one process, first in the initial weights",
    ),
    "a loop": (lambda world, mesh: endless(), "setup(None, mesh) is still running after 1 s"),
}  # fmt: skip


def endless():
    while True:
        pass


@pytest.mark.parametrize("name", BAD)
def test_a_bad_setup_is_refused_in_one_line(name):
    setup, words = BAD[name]
    with pytest.raises(ValueError) as error:
        minipar.verify_training(setup, dp=2, timeout_s=1 if name == "a loop" else 60)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("setups.py", "names no function"),
        ("nowhere.py:ddp", "there is no file nowhere.py"),
        (f"{setups.__file__}:absent", "defines no absent"),
        (3, "setup=3 is no function"),
    ],
)
def test_a_setup_that_is_not_there_is_refused(setup, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        minipar.verify_training(setup, dp=2)


def attention(world, mesh, dtype=torch.float32):
    """Train attention, whose key's bias has a gradient of rounding alone, by Adam, which makes whole steps of it."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(dtype)
    model = model if world is None else minipar.DDP(model, mesh.comm("dp"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(k):
        x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(k)).to(dtype)
        optimizer.zero_grad()
        loss = model(x if world is None else x.chunk(2)[mesh.coordinates.dp]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_accused(dtype):
    result = minipar.verify_training(partial(attention, dtype=dtype), dp=2)
    assert result.equal, str(result)


def test_the_command_judges_a_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "script.py"
    file.write_text(
        "from functools import partial\n"
        "from tests.train.verification.own_training.setups import averaged, train\n"
        "right, wrong = partial(train, after=averaged), train\n"
    )
    assert _exit(["verify", f"{file}:right", "--dp", "2", "--steps", "2"]) == 0
    assert "dp=2: the numbers of one process" in capsys.readouterr().out
    assert _exit(["verify", f"{file}:wrong", "--dp", "2", "--steps", "2"]) == 1
    assert "nobody averages them" in capsys.readouterr().out


def _exit(argv):
    with pytest.raises(SystemExit) as end:
        main(argv)
    return end.value.code


@pytest.mark.thorough
@pytest.mark.parametrize("group", ["", "dist.init_process_group('gloo')"])
def test_ranks_of_torchrun_get_one_result(group, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist, minipar\n"
        "from functools import partial\n"
        "from tests.train.verification.own_training.setups import averaged, train\n"
        f"{group}\n"
        "equal = [minipar.verify_training(case, dp=2).equal for case in (partial(train, after=averaged), train)]\n"
        "open(f'{__file__}.{dist.get_rank()}', 'w').write(str(equal))\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    here = Path(__file__).parents[4]
    done = subprocess.run(
        launch,
        env=os.environ | {"PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    said = [Path(f"{script}.{rank}").read_text() for rank in range(2)]
    assert said == ["[True, False]"] * 2, done.stderr


def time_first(world, mesh):
    """Train a recurrent net, whose samples are along dim 1, on the right samples, and forget to average."""
    torch.manual_seed(0)
    model = torch.nn.RNN(3, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(k):
        x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        optimizer.zero_grad()
        model(own_part(x.movedim(1, 0), mesh).movedim(0, 1))[0].square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def test_samples_may_be_along_another_dim():
    said = str(minipar.verify_training(time_first, dp=2))
    assert "keeps its own: nobody averages them" in said
    assert "samples" not in said


def by_epochs(world, mesh):
    """Step the schedule after an epoch of 100 steps, in a function of its own."""
    model, optimizer, step = train(world, mesh, after=averaged, optimizer=planned)
    schedule = optimizer.plan

    def end_epoch():
        schedule.step()

    def step_and_count(k):
        loss = step(k)
        if k % 100 == 99:
            end_epoch()
        return loss

    return model, optimizer, step_and_count


def test_a_schedule_that_waits_for_an_epoch_is_not_idle():
    assert minipar.verify_training(by_epochs, dp=2).equal
