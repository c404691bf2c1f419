"""What a step copies to a GPU lies in pinned memory and is not waited for; a batch is there before its step begins."""

import threading
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.data_parallel import arguments
from minipar.extras.optimizers import families
from minipar.mesh import Mesh
from minipar.pipeline import execute
from minipar.support import staging
from minipar.tensor_parallel import before_split
from minipar.train import optim, parallelize, step
from minipar.train.data.prefetch import prefetch_batches
from tests.train.nowhere import META, HostCopies, world_of

MODEL = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32, dropout=0.1)
BASE = TrainConfig(model=MODEL, batch_size=4, seq_len=32, steps=3, warmup=1)
TEXT = torch.arange(100)
BATCH = 4  # tensors

CASES = {
    "ddp, lamb": dict(dp=2, optimizer="lamb", recompute="full"),
    "zero 1, muon": dict(dp=2, zero=1, optimizer="muon"),
    "zero 2, lamb": dict(dp=2, zero=2, optimizer="lamb", dtype="bfloat16"),
    "zero 3": dict(dp=2, zero=3),
    "tp": dict(tp=2, sequence_parallel=True, tp_chunked=True),
    "tp 2d": dict(tp=4, tp_layout="2d"),
    "cp, ring": dict(cp=2),
    "cp, ulysses": dict(cp=4, cp_attention="ulysses"),
    "cp, all-gather": dict(cp=2, cp_attention="all_gather"),
    "usp": dict(cp=4, cp_attention="usp", cp_ulysses=2),
}  # fmt: skip


def copies_of_a_step(monkeypatch, options) -> HostCopies:
    """Of the second step: the first may make things, and agree on what does not change."""
    for module in (
        parallelize,
        optim,
        families,
    ):  # without values, there are no holders of a part to be found
        monkeypatch.setattr(module, "norm_shares", lambda params, comm, count_tied=False: [1.0] * len(params))
    for module in (arguments, execute, before_split):  # nor digests to compare
        monkeypatch.setattr(module, "require_equal", lambda *_: None)
    config = replace(BASE, **options)
    world, copies = world_of(config.world_size), HostCopies()
    copies.install(monkeypatch)
    state = parallelize.parallelize(config, Mesh(world, **config.mesh_sizes), META)
    step.train_step(world, state, config, TEXT, 0)
    copies.waited.clear()
    with copies:
        step.train_step(world, state, config, TEXT, 1)
    return copies


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_no_copy_to_the_device_is_waited_for(monkeypatch, name):
    copies = copies_of_a_step(monkeypatch, CASES[name])
    assert copies.waited == []
    assert copies.pinned > BATCH


def from_ordinary_memory(x, device):
    return x.to(device, non_blocking=True)


def blocking(x, device):
    return staging.pinned(x, device).to(device)


@pytest.mark.parametrize("fault", [from_ordinary_memory, blocking, Tensor.to])
def test_a_copy_that_is_waited_for_is_seen(monkeypatch, fault):
    monkeypatch.setattr(step, "pinned", lambda x, device: x)
    monkeypatch.setattr(step, "to_device", fault)
    assert copies_of_a_step(monkeypatch, dict(dp=2)).waited == BATCH * ["train/step.py <genexpr>"]


def test_a_batch_is_pinned_by_the_thread_that_makes_it_and_not_again(monkeypatch):
    copies, by = HostCopies(), []
    copies.install(monkeypatch)
    pin = Tensor.pin_memory
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: by.append(threading.current_thread().name) or pin(x))
    config = replace(BASE, dp=2, cp=2)
    mesh = Mesh(world_of(4), **config.mesh_sizes)
    with (
        closing(
            prefetch_batches(partial(step.local_batch, mesh, config, TEXT, device=META), range(2))
        ) as batches,
        copies,
    ):
        for _, batch in batches:
            inputs = step._inputs(batch, META)
            assert inputs["inputs"].shape == inputs["targets"].shape == (2, 16)
    of_main = [name for name in by if not name.startswith("batches")]
    assert len(by) - len(of_main) == 2 * BATCH
    assert (copies.waited, copies.pinned, len(copies._in_pinned_memory)) == ([], 2 * BATCH, 2 * BATCH)


def test_on_a_cpu_nothing_is_copied_or_pinned():
    x, cpu = torch.ones(3), torch.device("cpu")
    assert staging.to_device(x, cpu) is staging.pinned(x, cpu) is x
    y = torch.ones(3, device=META)
    assert staging.to_device(y, META) is y
