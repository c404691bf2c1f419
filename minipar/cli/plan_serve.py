"""`minipar plan --serve`."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

from functools import partial
from pathlib import Path
from typing import Any, Literal

from minipar.cli.parse import Work
from minipar.config.check_paths import require_picture


def plan_serve_command(
    model: str = "llama-70b",
    machine: str = "h100",
    prompt_tokens: int = 1024,
    new_tokens: int = 256,
    rate: float = 10.0,
    targets: tuple[float, float] = (1.0, 0.05),
    weight_bits: Literal[16, 8, 4] = 16,
    cache_bits: Literal[16, 8, 4, 2] = 16,
    piece: int = 512,
    all_reduce: Literal["ring", "direct"] = "ring",
    json: bool = False,
    picture: Path | None = None,
) -> Work:
    """Predict what serving a model takes; of tp 1, 2, 4 ... list those whose replicas meet the targets, fewest GPUs first.

    Predictions are means in a steady state: requests arrive at random, batch sizes follow Little's law, prompts queue as in
    M/D/1, and utilisation is at most 80 %. Rates of arithmetic, memory and links are those that runs reach: the data
    sheet's, times the machine's fractions. The plan does not cover pp, cp and ep, prefix hits, and speculation.

    Args:
        model: a name (llama-7b, llama3-70b, mixtral-8x7b ...), or a .toml file with the sizes of a model.
        machine: a name (a100-80gb, h100, h200, b200 ...), or a .toml file that describes a GPU and its node.
        prompt_tokens: tokens of a prompt.
        new_tokens: tokens generated for a request.
        rate: requests per second, over all replicas.
        targets: mean seconds to the first token, and per output token after it.
        weight_bits: bits of a stored weight; below 16, each group of 64 also has two 16-bit numbers.
        cache_bits: bits of a stored key or value; below 16, groups also have two numbers, as for weights.
        piece: the largest number of prompt tokens in a step, besides its decodes' tokens.
        all_reduce: how a decode step's rows are summed: ring, or direct, where a rank reads all other ranks' rows at once.
        json: print the numbers as JSON, in seconds and bytes.
        picture: a .png, .svg or .pdf file for the picture: time per token, and tokens per second, against the batch size.
    """
    asked = dict(
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        requests_per_s=rate,
        first_token_s=targets[0],
        token_s=targets[1],
        piece=piece,
        all_reduce=all_reduce,
    )
    return partial(_plan, model, machine, asked, (weight_bits, cache_bits), json, picture)


def _plan(
    model: str,
    machine: str,
    asked: dict[str, Any],
    bits: tuple[int, int],
    as_json: bool,
    picture: Path | None,
) -> None:
    import json
    import sys

    from minipar.cost.machines import find_machine
    from minipar.cost.model_table import find_model
    from minipar.cost.serving import Bits
    from minipar.cost.serving_plan import (
        ServingJob,
        no_service,
        plan_serving,
        serving_json,
        serving_text,
        with_fewer_bits,
    )

    if picture is not None:
        require_picture("picture", picture)
    job = ServingJob(find_model(model), find_machine(machine), **asked, bits=Bits(*bits))
    plan, shorter = plan_serving(job), with_fewer_bits(job)
    if not plan.services and plan.apart is None and not any(p.services for _, p in shorter):
        raise ValueError(no_service(plan))
    print(json.dumps(serving_json(plan, shorter), indent=1) if as_json else serving_text(plan, shorter))
    if picture is not None:
        from minipar.visualize.serving_plan import draw_serving_plan

        print(f"wrote {draw_serving_plan(job, picture)}", file=sys.stderr)
