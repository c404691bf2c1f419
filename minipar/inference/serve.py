"""The work of `minipar serve`: serve requests from a file with a checkpoint on local ranks; write results to a folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from minipar.comm import Comm
from minipar.comm.objects import all_gather_objects
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.model_config import ModelConfig
from minipar.inference.apart import check_sides, serve_apart
from minipar.inference.blocks import blocks_for, cache_bytes
from minipar.inference.draft_choice import DraftChoice
from minipar.inference.engine import Duration, Engine, Options, Result, as_measured, refusal
from minipar.inference.events import Event, Kind, StepCounts
from minipar.inference.expert_shares import check_expert_parallel
from minipar.inference.metrics import Metrics, metrics_of
from minipar.inference.paged_model import require_cacheable
from minipar.inference.quantized_weights import check_quantized_weights
from minipar.inference.request import Request
from minipar.inference.requests_file import ResultsFile, read_requests, result_line
from minipar.inference.text import Text
from minipar.mesh import Mesh
from minipar.model.transformer import Transformer
from minipar.runtime.devices import Machine, choose_backend
from minipar.runtime.launch import run
from minipar.support.atomic_files import prepare_folder, write_whole
from minipar.train.checkpoint.restore import Checkpoint, CheckpointRef, newest_whole
from minipar.train.data.tokenizer import Codec, codec_of_run
from minipar.train.state import BUFFER, PARAMETER
from minipar.train.text_generation import check_mesh, load_stage


class Service(NamedTuple):
    """The outcome of a service: a result for each line of the file that is not blank, and the log."""

    results: list[Result]
    events: list[Event]
    steps: list[StepCounts]
    metrics: Metrics


class MeshSizes(NamedTuple):
    """The mesh of a service. The ep ranks are among the cp ranks; with cp=1 they are additional ranks.

    prefill_tp  0, or the number of additional ranks, which prefill while the tp ranks decode
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    prefill_tp: int = 0

    @property
    def num_ranks(self) -> int:
        return self.prefill_tp + self.tp * self.pp * max(self.cp, self.ep)

    def mesh(self, world: Comm) -> Mesh:
        return Mesh(world, pp=self.pp, dp=self.ep if self.cp == 1 else 1, cp=self.cp, tp=self.tp, ep=self.ep)


ONE_RANK = MeshSizes()


def serve_file(
    run_folder: Path,
    requests: Path,
    out: Path,
    options: Options,
    sizes: MeshSizes = ONE_RANK,
    targets_s: tuple[float, float] = (float("inf"), float("inf")),
    on_done: Callable[[int, int], None] = lambda done, of: None,
    timeout_s: float = 60.0,
    draft: DraftChoice | None = None,
) -> Service:
    """Serve the requests of a file with a run's newest checkpoint; write results.jsonl and metrics.json to `out`.

    sizes      the mesh of the service
    targets_s  seconds to the first token, and per further token, within which a request counts towards goodput
    on_done    called with the number of finished requests, and the number of all served requests
    draft      None, or the draft of which each rank loads a copy

    The clock starts with the service and runs only during steps; when no request is left to serve, it jumps to the next
    arrival. With prefill_tp, both sides must know beforehand when a prefill will end. So steps of the prefill side count
    as the time that `step_line` predicts, and sending a cache counts as no time.

    A line that is not a request, or that the model cannot serve, gets a result that says why; all other lines are served.
    Results are appended in the order in which they are finished, so all finished results are in the file even if a rank
    fails, the disk is full, or Ctrl-C ends the service.
    Raises ValueError before any rank starts for a folder without a complete checkpoint, a mesh over which the model cannot
    be split, a draft with another vocabulary, or a file that cannot be read; ValueError for a file that cannot be
    written; RankError if a rank fails.
    """
    checkpoint, config, codec = open_run(run_folder, options, sizes)
    if draft is not None:
        draft.check(Path(run_folder), config)
    lines = read_requests(requests, codec.encode)
    refused = {
        number: why
        for number, line in enumerate(lines)
        if isinstance(line, Request) and (why := refusal(line, config, options))
    }
    prepare_folder(out)
    with ResultsFile(out / "results.jsonl") as file:
        answers = _Answers([refused.get(n, line) for n, line in enumerate(lines)], file, codec, on_done)
        answered: list[tuple[list[Event], list[StepCounts]]] = [([], [])]
        if answers.served:
            answered = run(
                _serve_rank, checkpoint.chosen, sizes, list(answers.served.values()), options, draft,
                world_size=sizes.num_ranks, backend="auto", timeout_s=timeout_s, on_report=answers.note,
            )  # fmt: skip
    events, steps = answered[0]
    events = [
        *(Event(Kind.REFUSE, number, 0.0, 0.0) for number in refused),
        *(event._replace(number=answers.numbers[event.number]) for event in events),
    ]
    service = Service(answers.results, events, steps, metrics_of(events, *targets_s))
    _write(out / "metrics.json", json.dumps(dataclasses.asdict(service.metrics), indent=2) + "\n")
    return service


class _Answers:
    """The results of a file's lines, each appended to results.jsonl as soon as it is known.

    served   number of a line -> its request, without the lines that are none
    numbers  for each served request, the number of its line
    """

    def __init__(
        self,
        lines: list[Request | str],
        file: ResultsFile,
        codec: Codec,
        on_done: Callable[[int, int], None],
    ):
        self._file, self._codec, self._on_done = file, codec, on_done
        self._num_done = 0
        self.results = [Result(error=line if isinstance(line, str) else None) for line in lines]
        self.served = {number: line for number, line in enumerate(lines) if isinstance(line, Request)}
        self.numbers = list(self.served)
        for number, line in enumerate(lines):
            if isinstance(line, str):
                self._write(number)

    def note(self, rank: int, finished: tuple[int, Result]) -> None:
        """Keep and write the result of a served request, given with the request's place among those served."""
        number = self.numbers[finished[0]]
        self.results[number] = finished[1]
        self._write(number)
        self._num_done += 1
        self._on_done(self._num_done, len(self.served))

    def _write(self, number: int) -> None:
        tokens, error = self.results[number].tokens, self.results[number].error
        prompt = self.served[number].prompt if number in self.served else ()
        text = Text(self._codec, prompt=prompt).add(tokens, is_last=True)
        self._file.append(result_line(number, tokens, text, error))


def open_run(run_folder: Path, options: Options, sizes: MeshSizes) -> tuple[Checkpoint, ModelConfig, Codec]:
    """Return a run's newest checkpoint, its model and its codec. Raises ValueError if they cannot be served on the mesh."""
    path = newest_whole(Path(run_folder) / CHECKPOINTS, {PARAMETER, BUFFER})
    if path is None:
        raise ValueError(f"{run_folder} has no whole checkpoint; train with --checkpoint-every first")
    checkpoint = Checkpoint(path)
    config = ModelConfig(**checkpoint.extra["model"])
    check_num_blocks(config, options, sizes, getattr(torch, checkpoint.extra["dtype"]))
    require_cacheable(config, options.block_size, sizes.cp, options.cache_bits, options.cache_group)
    check_mesh(config, sizes.tp, sizes.pp)
    if sizes.prefill_tp:
        for name, size in dict(pp=sizes.pp, cp=sizes.cp, ep=sizes.ep).items():
            if size > 1:
                raise ValueError(f"prefill_tp={sizes.prefill_tp} with {name}={size}; use it with tp alone")
        check_mesh(config, sizes.prefill_tp, 1)
        check_sides(config, options, sizes.prefill_tp, sizes.tp)
    check_expert_parallel(config, sizes.ep, sizes.cp)
    if options.weight_bits is not None:
        check_quantized_weights(config, options.weight_bits, options.weight_group, sizes.tp)
    return checkpoint, config, codec_of_run(Path(run_folder), checkpoint.extra)


def check_num_blocks(config: ModelConfig, options: Options, sizes: MeshSizes, dtype: torch.dtype) -> None:
    """Raise ValueError if the ranks' memory cannot hold the pool: on CPUs this machine's, on GPUs the largest one's.

    Each rank has two lists with 8 bytes per block. Quantized blocks are counted as at least their codes.
    """
    blocks, machine = options.num_blocks, Machine.here()
    bits = 8 * dtype.itemsize if options.cache_bits is None else options.cache_bits
    copies = (1 + bool(sizes.prefill_tp)) * (
        sizes.ep if sizes.cp == 1 else 1
    )  # ranks that hold the same blocks
    cache = copies * blocks * cache_bytes(config, options.block_size, options.block_size, 1) * bits // 8
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lists = 16 * blocks * sizes.num_ranks
    if choose_backend("auto", sizes.num_ranks, machine) == "nccl":
        on_gpus = sum(torch.cuda.get_device_properties(i).total_memory for i in range(machine.num_gpus))
        fits = cache <= on_gpus and lists <= available
    else:
        fits = cache + lists <= available
    if not fits:
        enough = options.max_running * blocks_for(config.max_seq_len, options.block_size)
        raise ValueError(
            f"num_blocks={blocks} takes {cache + lists:,} bytes, more than this machine's memory can hold; use {enough} "
            f"or less, which is enough for max_running={options.max_running} texts of max_seq_len={config.max_seq_len}"
        )


def _write(path: Path, content: str) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def make_engine(
    world: Comm, chosen: CheckpointRef, sizes: MeshSizes, options: Options, draft: DraftChoice | None
) -> Engine:
    """On each rank: load its part of the model, and the draft; return its engine."""
    mesh = sizes.mesh(world)
    checkpoint = chosen.open()
    if draft is not None:
        options = dataclasses.replace(options, draft=draft.load(world, checkpoint))
    return Engine(load_stage(checkpoint, mesh, world.device), options, mesh, duration=as_measured)


def _serve_rank(
    world: Comm, chosen: CheckpointRef, sizes: MeshSizes, requests: list[Request], options: Options,
    draft: DraftChoice | None,
) -> tuple[list[Event], list[StepCounts]]:  # fmt: skip
    """On each rank: serve; the first rank, or the first decode rank, reports each result as soon as it is finished."""
    if sizes.prefill_tp:
        return _serve_apart(world, chosen.open(), sizes.prefill_tp, requests, options, draft)
    engine = make_engine(world, chosen, sizes, options, draft)
    results = [Result() for _ in requests]
    for number in engine.ended(requests, results):
        if world.rank == 0:
            world.report((number, results[number]))
    return engine.events, engine.steps


def _serve_apart(
    world: Comm, checkpoint: Checkpoint, prefill_tp: int, requests: list[Request], options: Options,
    draft: DraftChoice | None,
) -> tuple[list[Event], list[StepCounts]]:  # fmt: skip
    def load(mesh: Mesh) -> Transformer:
        return load_stage(checkpoint, mesh, world.device)

    duration = step_line(world, load, options, prefill_tp)
    if draft is not None:
        options = dataclasses.replace(options, draft=draft.load(world, checkpoint))
    served = serve_apart(
        world, load, requests, options, prefill_tp, duration,
        decode_duration=as_measured, on_result=lambda number, result: world.report((number, result)),
    )  # fmt: skip
    return served.events, served.decode_steps


def step_line(
    world: Comm, load: Callable[[Mesh], Transformer], options: Options, prefill_tp: int
) -> Duration:
    """Return the time of a step of n tokens as a function a + b n: a line through two measured steps of the prefill ranks.

    One step has one token, the other as many as the budget and the model allow. Every rank of `world` calls this with the
    same arguments.
    """
    line = None
    if world.rank < prefill_tp:
        mesh = Mesh(world.subgroup(range(prefill_tp), "measured"), tp=prefill_tp)
        plain = dataclasses.replace(options, prefix_cache=False, draft=None)
        engine = Engine(load(mesh), plain, mesh, duration=as_measured)
        most = min(
            options.token_budget, engine.config.max_seq_len - 2, options.num_blocks * options.block_size - 2
        )
        request = Request((0,) * most, 2)
        engine.run([request])  # the first run, which allocates memory, is not measured
        engine.run([request])
        (many_s, one_s) = (step.end_s - step.begin_s for step in engine.steps)
        per_token_s = max(0.0, many_s - one_s) / max(1, most - 1)
        line = one_s - per_token_s, per_token_s
    fixed_s, per_token_s = all_gather_objects(world, line)[0]
    return lambda num_tokens, measured_s: max(0.0, fixed_s) + num_tokens * per_token_s
