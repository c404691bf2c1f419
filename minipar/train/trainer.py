"""The training loop of every rank, and the run around it: resume, logs, checkpoints, comparison with one process."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from minipar.comm.cuda_trace import trace_on
from minipar.comm.objects import gather_objects
from minipar.expert import gradient_comm
from minipar.mesh import Mesh
from minipar.runtime.environment import ranks_per_node, under_torchrun
from minipar.runtime.launch import init_from_env, run
from minipar.trace import Span, write_chrome_trace
from minipar.train.atomic_files import prepare_folder, write_whole
from minipar.train.check_paths import CHECKPOINTS
from minipar.train.checkpoint import Saver, checkpoint_path
from minipar.train.compression import restore_compression, stored_parts
from minipar.train.compression_config import exact_steps
from minipar.train.elastic import train_on_ranks_there_are
from minipar.train.initial_weights import check_initial_weights
from minipar.train.internode_traffic import warn_if_tp_crosses
from minipar.train.log import MetricsLog
from minipar.train.made_ahead import made_ahead
from minipar.train.parallelize import RankState, parallelize
from minipar.train.reference import Difference, ReferenceRun, compare, train_in_one_process
from minipar.train.restore import Checkpoint, Chosen, agree_on_newest, decided_on_rank_0, newest_whole
from minipar.train.resume import require_no_others, require_same_text, require_usable
from minipar.train.state import BUFFER, PARAMETER, StoredParameters, described, parts_of, restore
from minipar.train.step import evaluate, local_batch, train_step
from minipar.train.text import NO_TEXT, TextId, hold_out, load_data
from minipar.train.text_generation import sample_text
from minipar.train.tokenizer import TOKENIZER, name_of_codec, read_tokenizer
from minipar.train.toml_config import as_toml
from minipar.train.train_config import TrainConfig

PARAMETERS = ".parameters"  # in the run's folder, while it runs
SAMPLE_TOKENS = 300


@dataclass
class Result:
    """The result of `train`: its folder, metrics per step, spans per rank, a sample, the difference from one process."""

    folder: Path
    metrics: list[dict]
    traces: dict[int, list[Span]]
    sample: str
    difference: Difference | None
    reference: ReferenceRun | None


class Trained(NamedTuple):
    """The ranks' results: metrics per step, spans, a sample, and where the parameters after the verified steps are."""

    metrics: list[dict]
    traces: dict[int, list[Span]]
    sample: str
    verified: Chosen | None


def train(config: TrainConfig, on_progress=None) -> Result | None:
    """Train on `config.world_size` local ranks, or as one rank of torchrun's; then repeat the first steps in one process.

    on_progress(what, metrics)  called after every step, with what = "train" or "verify"
    Returns the result; under torchrun, None on every rank but rank 0.
    Raises ValueError for bad input before any rank starts, RankError where a rank fails.
    """
    check_initial_weights(config)
    text, digest = load_data(config)
    text, held_out = hold_out(text, config.seq_len) if config.eval_every else (text, None)
    text_id = TextId(digest, len(text), name_of_codec(config))
    work = partial(_train, text, held_out, text_id, on_progress)
    world = init_from_env(timeout_s=config.timeout_s) if under_torchrun() else None
    return train_on_ranks_there_are(config, world, work) if config.elastic else work(config, world)


def _train(text, held_out, text_id: TextId, on_progress, config: TrainConfig, world) -> Result | None:
    """Train on `world`, the ranks of torchrun's, or on local ranks where that is None."""
    if world is not None:
        if world.size != config.world_size:
            raise ValueError(
                f"{config.mesh_name} needs {config.world_size} ranks, and torchrun started {world.size}"
            )
        require_same_text(world, config, text_id)
    start = _choose_start(config, text_id, world)
    decided_on_rank_0(world, partial(prepare_folder, config.folder))
    if world is not None and world.rank:
        train_rank(world, config, text, held_out, start, text_id=text_id)
        return None
    if world is not None:
        warn_if_tp_crosses(config, ranks_per_node())
    tell = on_progress or (lambda what, metrics: None)
    write_whole(config.folder / "config.toml", as_toml(config))
    if config.tokenizer is not None:
        write_whole(config.folder / TOKENIZER, read_tokenizer(config.tokenizer))
    log = MetricsLog(config.folder, config.tensorboard, start.step if start else 0)

    def on_step(metrics: dict) -> None:
        log(metrics)
        tell("train", metrics)

    try:
        if world is not None:
            trained = train_rank(world, config, text, held_out, start, on_step, text_id)
        else:
            trained = run(
                train_rank, config, text, held_out, start, None, text_id, world_size=config.world_size, backend="auto",
                timeout_s=config.timeout_s, on_report=lambda rank, metrics: on_step(metrics),
            )[0]  # fmt: skip
        return _finish(config, text, trained, tell)
    finally:
        log.close()
        shutil.rmtree(config.folder / PARAMETERS, ignore_errors=True)


def _choose_start(config: TrainConfig, text_id: TextId, world=None) -> Chosen | None:
    """The checkpoint to go on from, the same for every rank; None to begin at step 0. Writes nothing."""
    if config.resume is None:
        return decided_on_rank_0(world, partial(require_no_others, config))
    folder = config.resume / CHECKPOINTS
    path = newest_whole(folder) if world is None else agree_on_newest(world, folder)
    return decided_on_rank_0(world, partial(require_usable, config, text_id, path))


def train_rank(
    world,
    config: TrainConfig,
    text,
    held_out=None,
    start: Chosen | None = None,
    report=None,
    text_id: TextId = NO_TEXT,
) -> Trained | None:
    """Run this rank's part of the training, from checkpoint `start` if given; rank 0 returns all ranks' results."""
    report = report or world.report
    torch.manual_seed(config.seed)
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    metrics, verified, trace, begin = [], None, trace_on(world.device), 0
    if start is not None:
        restore(state, start.open())
        restore_compression(state, start.open(), gradient_comm(state.mesh))
        begin = start.step
    store = _Store(world, config, state, start, text_id)
    make = partial(local_batch, state.mesh, config, text, device=world.device)
    with closing(made_ahead(make, range(begin, config.steps))) as batches:
        for step, batch in batches:
            world.trace = trace if _traced(config, step) else None
            metrics.append(train_step(world, state, config, text, step, batch=batch))
            if held_out is not None and (step + 1) % config.eval_every == 0:
                metrics[-1]["eval_loss"] = evaluate(world, state, config, held_out)
            if world.rank == 0:
                report(metrics[-1])
            if begin == 0 and step + 1 == min(config.verify_steps, exact_steps(config)):
                verified = store.parameters(step + 1)
            store.after(step + 1)
    world.trace = None
    traces = gather_objects(world, trace.spans)
    sample = store.sample(verified)
    if world.rank:
        return None
    return Trained(metrics, dict(enumerate(traces)), sample, verified)


class _Store:
    """Files that the ranks of a run write together: checkpoints, and parameters for the comparison and for the sample."""

    def __init__(self, world, config: TrainConfig, state: RankState, start: Chosen | None, text_id: TextId):
        self._world, self._config, self._state = world, config, state
        self._saver, self._step_of_parameters, self._text_id = None, 0, text_id
        if config.checkpoint_every:
            resumed = start and start.path
            # A copy of the states, to be written during the next steps, would be what is on disk because it has no room.
            wait = config.offload == "disk"
            self._saver = Saver(world, config.folder / CHECKPOINTS, config.keep, wait, resumed)

    def after(self, step: int) -> None:
        """Save the state after `step` steps, if it is time or the last; else look at the save in progress."""
        every, steps = self._config.checkpoint_every, self._config.steps
        if self._saver is None:
            return
        if step % every and step < steps:
            self._saver.look()
            return
        parts, numbers = parts_of(self._state)
        parts += stored_parts(self._state, gradient_comm(self._state.mesh))
        extra = described(self._config, self._text_id, step)
        if self._state.scaler is not None:
            extra["loss_scaler"] = self._state.scaler.state_dict()
        self._saver.save(step, parts, extra, numbers)
        if step == steps:
            self._saver.finish()

    def parameters(self, step: int) -> Chosen | None:
        """Write the parameters alone, and tell rank 0 where: `train` reads them there, since no rank has room for all."""
        saver = Saver(self._world, self._config.folder / PARAMETERS, keep=0, wait=True)
        parts = [part for part in parts_of(self._state)[0] if part.kind in (PARAMETER, BUFFER)]
        saver.save(step, parts, described(self._config, self._text_id))
        self._step_of_parameters = step
        return None if self._world.rank else Checkpoint(self._path(PARAMETERS, step)).chosen

    def sample(self, verified: Chosen | None) -> str | None:
        """Generate a sample, on rank 0, from the last checkpoint or, where none is kept, from parameters written for it."""
        config, steps = self._config, self._config.steps
        path = self._path(CHECKPOINTS if self._saver else PARAMETERS, steps)
        if self._saver is None and self._step_of_parameters != steps:
            self.parameters(steps)
        text = sample_text(self._world, config, path, SAMPLE_TOKENS)
        if self._world.rank == 0 and verified is None:
            shutil.rmtree(config.folder / PARAMETERS, ignore_errors=True)
        return text

    def _path(self, folder: str, step: int) -> Path:
        return checkpoint_path(self._config.folder / folder, step)


def _traced(config: TrainConfig, step: int) -> bool:
    middle = config.steps // 2
    return middle <= step < middle + config.trace_steps


def _finish(config: TrainConfig, text, trained: Trained, tell) -> Result:
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


def _reference_rank(world, config: TrainConfig, text, steps: int) -> ReferenceRun:
    """Run the reference in a process of its own, so that it uses one thread whatever the caller uses."""
    return train_in_one_process(config, text, steps, on_step=world.report)
