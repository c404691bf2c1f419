"""The training loop of every rank, and the run around it: resume, logs, checkpoints, comparison with one process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from minipar.comm import Comm
from minipar.comm.objects import gather_objects
from minipar.comm.transport.cuda_trace import trace_on
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.toml_config import as_toml
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.runtime.launch import init_from_env, run
from minipar.support.atomic_files import prepare_folder, write_whole
from minipar.support.environment import is_rank_0, ranks_per_node, under_torchrun
from minipar.support.errors import Stopped
from minipar.support.trace import DATA, Span, span, write_chrome_trace
from minipar.train.checkpoint.initial_weights import check_initial_weights
from minipar.train.checkpoint.restore import (
    CheckpointRef,
    agree_on_newest,
    decided_on_rank_0,
    newest_whole,
)
from minipar.train.data.prefetch import prefetch_batches
from minipar.train.data.text import NO_TEXT, Text, TextId, hold_out, load_data
from minipar.train.data.tokenizer import TOKENIZER, name_of_codec, read_tokenizer
from minipar.train.log import Metrics, MetricsLog
from minipar.train.node_warning import warn_if_tp_crosses
from minipar.train.optim import NotFinite
from minipar.train.parallelize import parallelize
from minipar.train.reference import Difference, ReferenceRun, compare, train_in_one_process
from minipar.train.resume import (
    in_own_folder,
    require_no_others,
    require_same_start,
    require_shared,
    require_usable,
    set_aside,
)
from minipar.train.run_files import PARAMETERS, RunFiles, Stop
from minipar.train.state import StoredParameters, restore
from minipar.train.step import evaluate, local_batch, train_step

OnProgress = Callable[[str, Metrics], None]


@dataclass
class Result:
    """The result of `train`: the folder, metrics per step, spans per rank, a text sample, the difference to one process."""

    folder: Path
    metrics: list[Metrics]
    traces: dict[int, list[Span]]
    sample: str
    difference: Difference | None
    reference: ReferenceRun | None


class Trained(NamedTuple):
    """The ranks' results: metrics per step, spans, a text sample, and a checkpoint of the parameters to be verified.

    stopped  the step after which the run was saved and stopped, as it had been asked to; None: it ran to its end
    """

    metrics: list[Metrics]
    traces: dict[int, list[Span]]
    sample: str
    verified: CheckpointRef | None
    stopped: int | None = None


Work = Callable[[TrainConfig, Comm | None], Result | None]


def train(
    config: TrainConfig, on_progress: OnProgress | None = None, stop: Stop | None = None
) -> Result | None:
    """Train on `config.world_size` local ranks, or as one of torchrun's ranks; then repeat the first steps in one process.

    on_progress(what, metrics)  called after every step, with what = "train" or "verify"
    stop()                      called after every step of a run with checkpoints; once it returns True on any of
                                torchrun's ranks, or here, the run is saved, and raises Stopped
    Returns the result; under torchrun, None on every rank but rank 0.
    Raises ValueError for bad input before any rank starts, RankError if a rank fails.
    """
    config.require_local_ranks()
    check_initial_weights(config)
    whole, digest = load_data(config)
    text: Text = whole
    held_out: Text | None = None
    if config.eval_every:
        text, held_out = hold_out(whole, config.seq_len)
    text_id = TextId(digest, len(text), name_of_codec(config))
    work = partial(_run_in_folder, text, held_out, text_id, on_progress, stop or (lambda: False))
    world = init_from_env(timeout_s=config.timeout_s) if under_torchrun() else None
    if world is not None:
        require_same_start(world, config, text_id)
    result: Result | None = config.choice("membership").load()(config, world, work)
    return result


def train_on_given_ranks(config: TrainConfig, world: Comm | None, work: Work) -> Result | None:
    """Train on all ranks of `world`, or on local ranks if `world` is None. `--membership fixed` names this function."""
    return work(config, world)


def _run_in_folder(
    text: Text, held_out: Text | None, text_id: TextId, on_progress: OnProgress | None, stop: Stop,
    config: TrainConfig, world: Comm | None,
) -> Result | None:  # fmt: skip
    """Train on `world`, which has torchrun's ranks, or on local ranks if it is None; write its folder, and compare."""
    if world is not None and world.size != config.world_size:
        raise ValueError(
            f"{config.mesh_name} needs {config.world_size} ranks, and torchrun started {world.size}"
        )
    start = _choose_start(config, text_id, world)
    decided_on_rank_0(world, partial(prepare_folder, config.folder))
    if world is not None:
        require_shared(world, config.folder)
    if world is not None and world.rank:
        _require_end(config, train_rank(world, config, text, held_out, start, None, text_id, stop))
        return None
    if world is not None:
        warn_if_tp_crosses(config, ranks_per_node())
    if not in_own_folder(config):
        set_aside(config.folder)
    tell = on_progress or (lambda what, metrics: None)
    write_whole(config.folder / "config.toml", as_toml(config))
    if config.tokenizer is not None:
        write_whole(config.folder / TOKENIZER, read_tokenizer(config.tokenizer))
    log = MetricsLog(config.folder, config.tensorboard, start.step if start and in_own_folder(config) else 0)

    def on_step(metrics: Metrics) -> None:
        log(metrics)
        tell("train", metrics)

    try:
        if world is not None:
            trained = train_rank(world, config, text, held_out, start, on_step, text_id, stop)
        else:
            trained = run(
                train_rank, config, text, held_out, start, None, text_id, world_size=config.world_size, backend="auto",
                timeout_s=config.timeout_s, on_report=lambda rank, metrics: on_step(metrics),
                on_ask=lambda rank, what: stop(),
            )[0]  # fmt: skip
        assert trained is not None  # not None on rank 0, where this runs
        _require_end(config, trained)
        return _finish(config, text, trained, tell)
    finally:
        log.close()
        shutil.rmtree(config.folder / PARAMETERS, ignore_errors=True)


def _choose_start(config: TrainConfig, text_id: TextId, world: Comm | None = None) -> CheckpointRef | None:
    """Return the checkpoint to resume from, the same on every rank; None to begin at step 0. Writes nothing."""
    if config.resume is None:
        return decided_on_rank_0(world, partial(require_no_others, config))
    folder = config.resume / CHECKPOINTS
    path = newest_whole(folder) if world is None else agree_on_newest(world, folder)
    return decided_on_rank_0(world, partial(require_usable, config, text_id, path))


def train_rank(
    world: Comm,
    config: TrainConfig,
    text: Text,
    held_out: Text | None = None,
    start: CheckpointRef | None = None,
    report: Callable[[Metrics], None] | None = None,
    text_id: TextId = NO_TEXT,
    stop: Stop | None = None,
) -> Trained | None:
    """Run this rank's part of the training, from checkpoint `start` if given; rank 0 returns all ranks' results.

    Every rank returns a result if the run is stopped before its end. Without `stop`, rank 0 asks its caller.
    """
    report = report or world.report
    stop = stop or (lambda: world.rank == 0 and bool(world.ask("stop")))
    torch.manual_seed(config.seed)
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    metrics, verified, trace, begin = [], None, trace_on(world.device), 0
    if start is not None:
        restore(state, start.open())
        begin = start.step
    files = RunFiles(world, config, state, start, text_id)
    make = partial(local_batch, state.mesh, config, text, device=world.device)
    with closing(prefetch_batches(make, range(begin, config.steps))) as batches:
        for step in range(begin, config.steps):
            world.trace = trace if _traced(config, step) else None
            start_s = time.perf_counter()
            with span(world.trace, "wait", DATA):
                _, batch = next(batches)
            data_wait_s = time.perf_counter() - start_s
            try:
                done = train_step(world, state, config, text, step, batch=batch, data_wait_s=data_wait_s)
            except NotFinite:
                files.finish()  # every rank is here, so what they have written becomes a checkpoint
                raise
            metrics.append(done)
            if held_out is not None and (step + 1) % config.eval_every == 0:
                metrics[-1]["eval_loss"] = evaluate(world, state, config, held_out)
            if world.rank == 0:
                report(metrics[-1])
            if begin == 0 and step + 1 == min(
                config.verify_steps, config.choice("compress").exact_steps(config)
            ):
                verified = files.parameters(step + 1)
            if files.after(step + 1, stop):
                return Trained(metrics, {}, "", None, step + 1)
    world.trace = None
    traces = gather_objects(world, trace.spans)
    sample = files.sample(verified)
    if traces is None or sample is None:
        return None
    return Trained(metrics, dict(enumerate(traces)), sample, verified)


def _require_end(config: TrainConfig, trained: Trained | None) -> None:
    """Raise Stopped if the run was stopped. Of torchrun's ranks only rank 0 has words for it."""
    if trained is not None and trained.stopped is not None:
        folder = config.folder
        words = f"stopped and saved after step {trained.stopped}; go on with --resume {folder} --out {folder}"
        raise Stopped(words if is_rank_0() else "")


def _traced(config: TrainConfig, step: int) -> bool:
    middle = config.steps // 2
    return middle <= step < middle + config.trace_steps


def _finish(config: TrainConfig, text: Text, trained: Trained, tell: OnProgress) -> Result:
    """Write the sample and the trace, then repeat the first steps in one process and compare."""
    folder, metrics = config.folder, trained.metrics
    write_whole(folder / "sample.txt", trained.sample + "\n")
    write_chrome_trace(folder / "trace.json", trained.traces)
    difference = reference = None
    if trained.verified is not None:
        steps = trained.verified.step
        reference = run(
            _reference_rank, config, text, steps, world_size=1,
            on_report=lambda rank, step: tell("verify", {"step": step}),
        )[0]  # fmt: skip
        losses, norms = ([line[name] for line in metrics[:steps]] for name in ("loss", "grad_norm"))
        stored = StoredParameters(trained.verified.open(), config.torch_dtype)
        difference = compare(ReferenceRun(losses, norms, stored), reference)
    return Result(folder, metrics, trained.traces, trained.sample, difference, reference)


def _reference_rank(world: Comm, config: TrainConfig, text: Text, steps: int) -> ReferenceRun:
    """Run the reference in a process of its own, so that it uses one thread even if the caller uses more."""
    return train_in_one_process(config, text, steps, on_step=world.report)
