"""`minipar serve`."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from minipar.cli.parse import Work
from minipar.config.check_paths import require_checkpoint, require_readable, require_writable
from minipar.support.errors import require_positive
from minipar.support.registry import Choice, Kind

if TYPE_CHECKING:
    from minipar.inference import DraftChoice, Options
    from minipar.inference.metrics import Metrics


# A server is an extra: it loads a function with `serve_http`'s arguments, which returns when the service ends.
SERVERS: Kind[Choice] = Kind("server", {})
DEFAULT_PORT = 8000


def serve_command(
    run: tyro.conf.Positional[Path],
    requests: Path | None = None,
    http: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="[PORT]")] = None,
    host: str = "127.0.0.1",
    max_open: int = 256,
    out: Path = Path("runs/serve"),
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    prefill_tp: int = 0,
    policy: Literal["first-come", "shortest-remaining", "multi-level-feedback"] = "first-come",
    block_size: int = 16,
    num_blocks: int = 256,
    token_budget: int = 256,
    max_running: int = 64,
    prefix_cache: bool = True,
    preemption: Literal["recompute", "swap"] = "recompute",
    cache_bits: Literal[8, 4, 2] | None = None,
    weight_bits: Literal[8, 4] | None = None,
    weight_group: int = 64,
    offload: str = "none",
    offload_folder: Path | None = None,
    one_by_one: bool = False,
    draft: str | None = None,
    num_drafts: int | None = None,
    targets: tuple[float, float] = (float("inf"), float("inf")),
    draw: bool = True,
) -> Work:
    """Serve many requests in one batch, from the newest checkpoint of a run; each gets the same text as if served alone.

    That holds in float32, unless two tokens are equally likely up to rounding; in bfloat16 it takes --one-by-one.

    With --requests, serves those in a file, and writes results.jsonl, metrics.json, a picture of the requests over time,
    and one of the same requests in static batches of max_running. Each line of the file is a request in JSON:
    {"prompt": "The ", "max_new_tokens": 20, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": 3, "arrival_s": 0.5}.
    A line that is not a request gets an error as its result; the requests on the other lines are served.

    With --http, serves OpenAI's clients: POST /v1/chat/completions and /v1/completions, with or without "stream",
    GET /v1/models, /health and /metrics. Needs pip install 'minipar[http]'. A body of over 1 MiB, or 64 bytes per token of
    context if that is more, gets status 413; a request that is not sent within 30 s gets 408.

    Args:
        run: the folder of a run that was trained with --checkpoint-every.
        requests: a file with one request per line; each needs prompt and max_new_tokens.
        http: serve over HTTP on this port: 8000 if no number is given; 0 takes any free port.
        host: the address to listen on; by default only this machine can connect, with 0.0.0.0 any other.
        max_open: over HTTP, the largest number of requests that run or wait at once; further ones get status 429, and
            with 256 more connections than that, 503.
        out: the folder to which the results of --requests are written.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
        cp: context-parallel ranks, which divide the tokens of every sequence, and their cache, among them.
        ep: expert-parallel ranks, which divide the experts among them: the cp ranks, or additional ranks if cp is 1.
        prefill_tp: tensor-parallel ranks only for prefill, which send the caches to the tp ranks, which decode; so no
            decode waits for a prompt. 0: the same ranks do both. With --requests and tp alone.
        policy: which requests go first when not all can be served at once.
        block_size: tokens per block of the key/value cache.
        num_blocks: blocks of the cache, for all requests together.
        token_budget: the largest number of tokens in a step; prompts are prefilled in chunks, in what decodes leave of it.
        max_running: the largest number of requests in a step.
        prefix_cache: keep blocks of earlier requests for requests that begin with the same tokens.
        preemption: what happens to the blocks that a request gives up: recomputed later, or swapped to CPU memory.
        cache_bits: quantize keys and values of full blocks to this many bits; texts change, but not with the batch.
        weight_bits: quantize the layers' weights to this many bits; texts change, but not with the batch or the mesh.
        weight_group: with 4 bits, the number of a weight's inputs that share a scale; it divides the inputs of every layer.
        offload: where layers' weights are stored while others compute; `minipar train --help offload` lists the choices.
        offload_folder: with disk, a folder for that file; none: the system's folder for temporary files.
        one_by_one: read each token in a forward of its own, so that no rounding depends on the batch, on blocks or on
            pieces of prompts: needed for one text in bfloat16, and slower, since weights are read once per token.
        draft: what guesses the tokens that one pass verifies: ngram (repetitions in the text), layers:K (the model's first
            K layers), or the folder of a run with a smaller model. The text stays the same.
        num_drafts: tokens guessed per step, 4 by default with --draft; without --draft, ngram guesses them. 0: no guesses.
        targets: seconds to the first token, and per token after it, within which a request counts towards goodput.
        draw: draw the pictures.
    """
    sizes = dict(
        block_size=block_size, num_blocks=num_blocks, token_budget=token_budget, max_running=max_running
    )
    how = dict(
        policy=policy, prefix_cache=prefix_cache, preemption=preemption, cache_bits=cache_bits,
        weight_bits=weight_bits, weight_group=weight_group, offload=offload,
        offload_folder=None if offload_folder is None else str(offload_folder), one_by_one=one_by_one,
    )  # fmt: skip
    mesh = dict(tp=tp, pp=pp, cp=cp, ep=ep, prefill_tp=prefill_tp)
    engine: dict[str, Any] = dict(run=run, mesh=mesh, sizes=sizes, how=how, speculation=(draft, num_drafts))
    if http is not None and requests is None:
        if prefill_tp:
            raise ValueError(f"prefill_tp={prefill_tp} with --http; use it with --requests")
        return partial(_serve_http, **engine, host=host, ports=http, max_open=max_open)
    if http is not None or requests is None:
        raise ValueError("serve needs --requests FILE or --http, and not both")
    return partial(_serve_file, **engine, requests=requests, out=out, targets=targets, draw=draw)


def _serve_file(
    run: Path, mesh: dict[str, int], sizes: dict[str, Any], how: dict[str, Any],
    speculation: tuple[str | None, int | None], requests: Path, out: Path, targets: tuple[float, float], draw: bool,
) -> None:  # fmt: skip
    require_checkpoint("run", run)
    require_readable("requests", requests)
    require_writable(out)
    if not all(target >= 0 for target in targets):  # nan is no target either
        raise ValueError(f"targets={targets[0]} {targets[1]}; use seconds, 0 or more; inf for none")
    options, draft = _engine(mesh, sizes, how, speculation)
    from tqdm import tqdm

    from minipar.inference.serve import MeshSizes, serve_file

    with tqdm(desc="serve", unit="request", disable=None) as bar:

        def show(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        service = serve_file(
            run, requests, out, options, MeshSizes(**mesh), targets, on_done=show, draft=draft
        )
    for number, result in enumerate(service.results):
        if result.error is not None:
            print(f"request {number} is not served: {result.error}")
    print(_summary(service.metrics))
    if draw and service.steps:
        from minipar.visualize.serving import draw_batching, draw_service

        draw_service(service.events, service.steps, out / "requests.png", sizes["num_blocks"])
        if service.metrics.num_finished:
            draw_batching(service.events, service.steps, out / "batching.png", sizes["max_running"])
    print(f"look in {out}/")
    if service.results and not service.metrics.num_finished:
        print("minipar: no request was served", file=sys.stderr)
        raise SystemExit(1)


def _serve_http(
    run: Path, mesh: dict[str, int], sizes: dict[str, Any], how: dict[str, Any],
    speculation: tuple[str | None, int | None], host: str, ports: tuple[int, ...], max_open: int,
) -> None:  # fmt: skip
    require_checkpoint("run", run)
    require_positive(max_open=max_open)
    if len(ports) > 1 or any(not 0 <= port < 1 << 16 for port in ports):
        given = " ".join(map(str, ports))
        raise ValueError(f"http={given}; use one port from 1 to {(1 << 16) - 1}, or 0 for any that is free")
    options, draft = _engine(mesh, sizes, how, speculation)
    try:
        serve_http = SERVERS["http"].load()
    except ImportError as error:
        raise ValueError(f"--http needs {error.name}; pip install 'minipar[http]' brings it") from None
    say = partial(print, flush=True)
    from minipar.inference.serve import MeshSizes

    serve_http(
        run, options, MeshSizes(**mesh), draft, host, ports[0] if ports else DEFAULT_PORT, max_open, say
    )


def _engine(
    mesh: dict[str, int],
    sizes: dict[str, Any],
    how: dict[str, Any],
    speculation: tuple[str | None, int | None],
) -> "tuple[Options, DraftChoice | None]":
    """Return the engine's options, and the draft or None. Raises ValueError if an option or the draft is impossible."""
    if mesh["prefill_tp"] < 0:
        raise ValueError(f"prefill_tp={mesh['prefill_tp']}; use 0 or more")
    require_positive(**{name: size for name, size in mesh.items() if name != "prefill_tp"}, **sizes)
    word, num_drafts = _draft(*speculation)
    from minipar.inference import DraftChoice, Options

    options = Options(**sizes, **how, num_drafts=max(1, num_drafts))
    return options, DraftChoice(word) if num_drafts else None


def _draft(word: str | None, num_drafts: int | None) -> tuple[str, int]:
    """Return the draft's name, and how many tokens it guesses per step: 0 if there is none."""
    if num_drafts is None:
        num_drafts = 0 if word is None else 4
    if num_drafts < 0:
        raise ValueError(f"num_drafts={num_drafts}; use 0 or more")
    return word or "ngram", num_drafts


def _summary(metrics: "Metrics") -> str:
    first, gap = metrics.to_first_token_s, metrics.inter_token_s
    return (
        f"{metrics.num_finished} requests, {metrics.num_tokens} tokens in {metrics.seconds:.2f} s: "
        f"{metrics.tokens_per_s:,.0f} tokens/s, goodput {metrics.goodput_per_s:.2f} requests/s\n"
        f"time to first token {1e3 * first.p50:.0f} ms (P99 {1e3 * first.p99:.0f}), "
        f"between tokens {1e3 * gap.p50:.1f} ms (P99 {1e3 * gap.p99:.1f}), "
        f"{metrics.preemptions} preemptions, {metrics.prefix_hit_rate:.0%} of prompts found in the prefix cache"
    )
