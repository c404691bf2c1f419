"""The training loop of every rank, and the run around it: resume, logs, checkpoints, comparison with one process."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from minipar.comm.objects import gather_objects
from minipar.mesh import Mesh, Placement, gather, placement_of
from minipar.model import Transformer, generate
from minipar.runtime.environment import ranks_per_node, under_torchrun
from minipar.runtime.launch import init_from_env, run
from minipar.trace import Span, Trace, write_chrome_trace
from minipar.train.atomic_files import prepare_folder, write_whole
from minipar.train.checkpoint import Saver
from minipar.train.internode_traffic import warn_if_tp_crosses
from minipar.train.log import MetricsLog
from minipar.train.parallelize import RankState, parallelize
from minipar.train.reference import Difference, ReferenceRun, compare, train_in_one_process
from minipar.train.restore import Checkpoint, checkpoints, newest_whole
from minipar.train.state import buffers_of, described, parts_of, require_same_run, restore
from minipar.train.step import evaluate, train_step
from minipar.train.text import hold_out, load_text, require_samples
from minipar.train.toml_config import as_toml
from minipar.train.train_config import TrainConfig

CHECKPOINTS = "checkpoints"  # in the run's folder
SAMPLE_PROMPT = "The "


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
    """The ranks' results: metrics per step, parameters after the verified steps and (with buffers) at the end, spans."""

    metrics: list[dict]
    first: dict[str, torch.Tensor]
    last: dict[str, torch.Tensor]
    traces: dict[int, list[Span]]


def train(config: TrainConfig, on_progress=None) -> Result | None:
    """Train on `config.world_size` local ranks, or as one rank of torchrun's; then repeat the first steps in one process.

    on_progress(what, metrics)  called after every step, with what = "train" or "verify"
    Returns the result; under torchrun, None on every rank but rank 0.
    Raises ValueError for bad input before any rank starts, RankError where a rank fails.
    """
    text = load_text(config.text)
    require_samples(text, config.seq_len, config.text)
    text, held_out = hold_out(text, config.seq_len) if config.eval_every else (text, None)
    prepare_folder(config.folder)
    start = _checkpoint_to_resume(config)
    _require_no_others(config)
    tell = on_progress or (lambda what, metrics: None)
    world = None
    if under_torchrun():
        world = init_from_env(timeout_s=config.timeout_s)
        _require_world(world.size, config)
        if world.rank == 0:
            warn_if_tp_crosses(config, ranks_per_node())
    if world is not None and world.rank:
        train_rank(world, config, text, held_out, start)
        return None
    write_whole(config.folder / "config.toml", as_toml(config))
    log = MetricsLog(config.folder, config.tensorboard, Checkpoint(start).step if start else 0)

    def on_step(metrics: dict) -> None:
        log(metrics)
        tell("train", metrics)

    try:
        if world is not None:
            trained = train_rank(world, config, text, held_out, start, on_step)
        else:
            trained = run(
                train_rank, config, text, held_out, start, world_size=config.world_size,
                timeout_s=config.timeout_s, on_report=lambda rank, metrics: on_step(metrics),
            )[0]  # fmt: skip
    finally:
        log.close()
    return _finish(config, text, trained, tell)


def _require_world(size: int, config: TrainConfig) -> None:
    if size != config.world_size:
        raise ValueError(f"{config.mesh_name} needs {config.world_size} ranks, and torchrun started {size}")


def _require_no_others(config: TrainConfig) -> None:
    """Refuse a folder with another run's checkpoints: only the highest step numbers are kept, of whichever run."""
    goes_on = config.resume is not None and config.resume.resolve() == config.folder.resolve()
    if config.checkpoint_every and not goes_on and checkpoints(config.folder / CHECKPOINTS):
        raise ValueError(
            f"{config.folder} has checkpoints of an earlier run; go on with that by --resume {config.folder}, "
            "or use another --out or --name"
        )


def _checkpoint_to_resume(config: TrainConfig) -> Path | None:
    if config.resume is None:
        return None
    path = newest_whole(config.resume / CHECKPOINTS)
    if path is not None:
        require_same_run(config, Checkpoint(path))
    elif config.resume.resolve() != config.folder.resolve():
        raise ValueError(
            f"resume={config.resume} has no whole checkpoint; train with --checkpoint-every first"
        )
    return path


def train_rank(
    world,
    config: TrainConfig,
    text: torch.Tensor,
    held_out: torch.Tensor | None = None,
    start: Path | None = None,
    report=None,
) -> Trained | None:
    """Run this rank's part of the training, from checkpoint `start` if given; rank 0 returns all ranks' results."""
    report = report or world.report
    torch.manual_seed(config.seed)
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    metrics, first, trace, begin = [], [], Trace(), 0
    if start is not None:
        checkpoint = Checkpoint(start)
        restore(state, checkpoint)
        begin = checkpoint.step
    saver = Saver(world, config.folder / CHECKPOINTS, config.keep) if config.checkpoint_every else None
    for step in range(begin, config.steps):
        world.trace = trace if _traced(config, step) else None
        metrics.append(train_step(world, state, config, text, step))
        if held_out is not None and (step + 1) % config.eval_every == 0:
            metrics[-1]["eval_loss"] = evaluate(world, state, config, held_out)
        if world.rank == 0:
            report(metrics[-1])
        if step + 1 == min(config.verify_steps, config.steps):
            first = held_parameters(state)
        if saver is not None and (step + 1) % config.checkpoint_every == 0:
            parts, numbers = parts_of(state)
            saver.save(step + 1, parts, described(config, _all_numbers(world, numbers)))
    if saver is not None:
        saver.finish()
    world.trace = None
    last = held_parameters(state) + list(buffers_of(state))
    traces, first, last = (gather_objects(world, x) for x in (trace.spans, first, last))
    if world.rank:
        return None
    return Trained(metrics, whole_parameters(first), whole_parameters(last), dict(enumerate(traces)))


def _all_numbers(world, mine: dict) -> dict:
    """Gather the scalar optimizer state of all ranks' parameters on rank 0, which writes it."""
    everywhere = gather_objects(world, mine) or [mine]
    return {name: numbers for rank in everywhere for name, numbers in rank.items()}


def held_parameters(state: RankState) -> list[tuple[Placement, torch.Tensor]]:
    """Copy to the CPU the parts of the parameters that this rank updates, with their placements."""
    return [(placement_of(x), x.detach().to("cpu", copy=True)) for x in state.optimizer.tensors]


def whole_parameters(held: list[list[tuple[Placement, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Assemble the one-process parameters from the parts that all ranks hold."""
    parts: dict[str, list] = {}
    for placement, local in chain.from_iterable(held):
        if placement.tied_to is None:
            parts.setdefault(placement.name, []).append((placement, local))
    return {name: gather(pieces, check_replicas=False) for name, pieces in parts.items()}


def _traced(config: TrainConfig, step: int) -> bool:
    middle = config.steps // 2
    return middle <= step < middle + config.trace_steps


def _sample(world, config: TrainConfig, parameters: dict[str, torch.Tensor], num_bytes: int = 300) -> str:
    model = Transformer(config.model, device="meta", dtype=config.torch_dtype)
    model.load_state_dict(parameters, assign=True)
    prompt = torch.tensor(list(SAMPLE_PROMPT.encode()))
    tokens = generate(model, prompt, num_bytes, temperature=0.7).clamp(max=255)
    return bytes(tokens.tolist()).decode(errors="replace")


def _finish(config: TrainConfig, text, trained, tell) -> Result:
    """Write the sample and the trace, then repeat the first steps in one process and compare."""
    folder, metrics = config.folder, trained.metrics
    sample = run(_sample, config, trained.last, world_size=1)[0]
    write_whole(folder / "sample.txt", sample + "\n")
    write_chrome_trace(folder / "trace.json", trained.traces)
    steps = min(config.verify_steps, config.steps) if metrics[0]["step"] == 0 else 0
    difference = reference = None
    if steps:
        reference = run(
            _reference_rank, config, text, steps, world_size=1,
            on_report=lambda rank, step: tell("verify", {"step": step}),
        )[0]  # fmt: skip
        lines = metrics[:steps]
        difference = compare(
            ReferenceRun(
                [line["loss"] for line in lines], [line["grad_norm"] for line in lines], trained.first
            ),
            reference,
        )
    return Result(folder, metrics, trained.traces, sample, difference, reference)


def _reference_rank(world, config: TrainConfig, text, steps: int) -> ReferenceRun:
    """Run the reference in a process of its own, so that it uses one thread whatever the caller uses."""
    return train_in_one_process(config, text, steps, on_step=world.report)
