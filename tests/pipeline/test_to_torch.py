"""An exported schedule, run by torch's own runtime: the gradients of one process."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.pipelining as theirs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from minipar.runtime.launch import run
from minipar.schedules.registry import make_schedule
from minipar.schedules.schedule import Schedule
from minipar.schedules.torch_csv import to_torch
from tests.examples import examples
from tests.pipeline.strategies import chunks
from tests.schedules.families import WHOLE_SAMPLES

PLAIN = sorted(name for name in WHOLE_SAMPLES if name != "offloaded")

WIDTH = 4


def layers(num_stages: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(num_stages)]
    for stage in stages:
        stage.weight.data.normal_(generator=generator)
        stage.bias.data.normal_(generator=generator)
    return stages


def loss_fn(y, target):
    return (y - target).square().mean()


def step_in_torch(world, schedule: Schedule, csv: str, folder: str, batch):
    """Run one step of torch's runtime on this rank's stages; return their gradients by stage, and the losses."""
    warnings.filterwarnings("ignore", module="torch.distributed")
    path = f"{folder}/rank{world.rank}.csv"
    with open(path, "w") as file:
        file.write(csv)
    all_stages, own = layers(schedule.num_stages), schedule.stages_of(world.rank)
    stages = [
        theirs.PipelineStage(all_stages[s], s, schedule.num_stages, world.device, group=world.process_group())
        for s in own
    ]
    m = schedule.num_microbatches
    runtime = _PipelineScheduleRuntime(stages, m, loss_fn=loss_fn, scale_grads=True)
    runtime._load_csv(path)
    inputs = batch[:1] if 0 in own else ()
    last = {"target": batch[1], "losses": []} if schedule.num_stages - 1 in own else {}
    runtime.step(*inputs, **last)
    return {s: all_stages[s].weight.grad for s in own}, last.get("losses")


@st.composite
def drawn_schedules(draw) -> Schedule:
    name = draw(st.sampled_from(PLAIN))
    p = draw(st.integers(2, 3))
    return make_schedule(name, p, draw(st.integers(2 * p, 2 * p + 1)), draw(chunks(name)))


@examples(5)
@given(drawn_schedules())
def test_torchs_runtime_computes_what_one_process_computes(tmp_path_factory, schedule):
    m = schedule.num_microbatches
    batch = torch.randn(
        2, 2 * m, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).unbind()
    whole = layers(schedule.num_stages)
    wanted = loss_fn(nn.Sequential(*whole)(batch[0]), batch[1])
    wanted.backward()
    folder = str(tmp_path_factory.mktemp("schedule"))
    results = run(step_in_torch, schedule, to_torch(schedule), folder, batch, world_size=schedule.num_ranks)
    for gradients, losses in results:
        for stage, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole[stage].weight.grad)
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), wanted.detach())


def test_a_row_per_rank_in_the_notation_of_torch():
    assert to_torch(make_schedule("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert to_torch(make_schedule("zb-h1", 1, 1)) == "0F0,0I0,0W0\n"


@pytest.mark.parametrize("name", PLAIN)
def test_stages_keep_their_numbers(name):
    schedule = make_schedule(name, 2, 2)
    rows = to_torch(schedule).splitlines()
    for rank, row in enumerate(rows):
        assert {int(cell[0]) for cell in row.split(",")} == set(schedule.stages_of(rank))
