"""Format a service's counters in Prometheus's text format, version 0.0.4."""

from __future__ import annotations

from minipar.extras.http.live import BOUNDS_S, Desk, FirstTokenTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(desk: Desk) -> str:
    """Return the page that Prometheus scrapes: totals since the start, and the current numbers of blocks and requests."""
    totals, now = desk.totals, desk.progress
    outcomes = {name: getattr(totals, name) for name in ("finished", "refused", "cancelled", "turned_away")}
    families: list[tuple[str, str, str, dict[str, float]]] = [
        ("requests_total", "counter", "Requests, by how they ended.",
         {f'{{outcome="{name}"}}': count for name, count in outcomes.items()}),
        ("prompt_tokens_total", "counter", "Tokens of prompts.", {"": totals.prompt_tokens}),
        ("written_tokens_total", "counter", "Tokens written.", {"": totals.written_tokens}),
        ("prefix_tokens_total", "counter", "Tokens of prompts found in the prefix cache.", {"": totals.prefix_tokens}),
        ("preemptions_total", "counter", "Preemptions.", {"": totals.preemptions}),
        ("requests_open", "gauge", "Requests that are not finished.", {"": desk.num_open}),
        ("requests_running", "gauge", "Requests that hold blocks.", {"": now.num_running}),
        ("requests_waiting", "gauge", "Requests without a block.", {"": now.num_waiting}),
        ("cache_blocks_held", "gauge", "Blocks of the cache that are held, and by whom.",
         {'{holder="requests"}': now.num_blocks, '{holder="prefixes"}': now.num_prefix_blocks}),
    ]  # fmt: skip
    lines = []
    for name, kind, help, samples in families:
        lines += [f"# HELP minipar_{name} {help}", f"# TYPE minipar_{name} {kind}"]
        lines += [f"minipar_{name}{labels} {value}" for labels, value in samples.items()]
    name = "minipar_first_token_seconds"
    lines += [f"# HELP {name} Seconds from arrival to the first token.", f"# TYPE {name} histogram"]
    return "\n".join([*lines, *_buckets(name, totals.first_token)]) + "\n"


def _buckets(name: str, times: FirstTokenTimes) -> list[str]:
    lines, so_far = [], 0
    for bound, count in zip([*BOUNDS_S, "+Inf"], times.counts):
        so_far += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {so_far}')
    return [*lines, f"{name}_sum {times.sum_s:.6f}", f"{name}_count {so_far}"]
