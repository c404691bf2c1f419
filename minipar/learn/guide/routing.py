"""Small mixtures of experts trained with one routing option changed at a time: loss, drops, and bytes of each.

`minipar routing` runs them, and draws them. docs/routing.md shows one such run, kept in routing.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.data.text import Text, hold_out, load_text
from minipar.mesh import Mesh
from minipar.runtime.launch import run
from minipar.train.parallelize import parallelize
from minipar.train.step import evaluate, train_step

MODEL = ModelConfig(
    dim=32, num_layers=2, num_heads=2, hidden_dim=64, max_seq_len=64, num_experts=8, top_k=1, capacity_factor=1.25,
    moe_every=1,
)  # fmt: skip
BASE = TrainConfig(model=MODEL, dp=2, ep=2, seq_len=64, batch_size=16, eval_every=1)
LAST = 20  # steps at the end over which drops and bytes are averaged

# Panel -> label -> what is changed. "" is BASE itself.
CHANGES: dict[str, dict[str, dict[str, object]]] = {
    "experts a token": {"1": {}, "2": {"top_k": 2}, "4": {"top_k": 4}},
    "capacity factor": {
        "0.75": {"capacity_factor": 0.75},
        "1": {"capacity_factor": 1.0},
        "1.25": {},
        "2": {"capacity_factor": 2.0},
        "none": {"capacity_factor": None},
    },
    "noise of the router": {
        "none": {},
        "jitter 0.1": {"jitter": 0.1},
        "jitter 0.5": {"jitter": 0.5},
        "noisy": {"router": "noisy_top_k"},
    },
    "weight of the z-loss": {
        "0": {"z_coef": 0.0},
        "0.001": {},
        "0.01": {"z_coef": 0.01},
        "0.1": {"z_coef": 0.1},
    },
}


class Routed(NamedTuple):
    """One setting: means over its seeds of held-out loss, dropped choices and kilobytes sent by a rank over ep in a step.

    lowest, highest  held-out loss, over the seeds
    """

    panel: str
    label: str
    loss: float
    lowest: float
    highest: float
    drops: float
    kilobytes: float


def measure(steps: int, seeds: int = 1, tell: Callable[[str], None] = print) -> list[Routed]:
    """Train each setting for `steps` steps on two ranks, with each seed. Equal settings are trained once."""
    found: dict[ModelConfig, tuple[float, float, float, float, float]] = {}
    text, held_out = hold_out(load_text(None), BASE.seq_len)
    rows = []
    for panel, labels in CHANGES.items():
        for label, changes in labels.items():
            model = replace(MODEL, **changes)  # type: ignore[arg-type]  # values of ModelConfig's fields
            if model not in found:
                config = replace(BASE, model=model, steps=steps, warmup=min(20, steps))
                runs = [replace(config, seed=seed) for seed in range(seeds)]
                got = [run(_trained, one, text, held_out, world_size=one.world_size)[0] for one in runs]
                losses, drops, sent = zip(*got)
                means = [sum(values) / seeds for values in (losses, drops, sent)]
                found[model] = means[0], min(losses), max(losses), means[1], means[2]
                tell(f"{panel} {label}: loss {means[0]:.3f}")
            rows.append(Routed(panel, label, *found[model]))
    return rows


def _trained(world: Comm, config: TrainConfig, text: Text, held_out: Text) -> tuple[float, float, float]:
    mesh = Mesh(world, dp=config.dp, ep=config.ep)
    state = parallelize(config, mesh, world.device)
    drops, ep, last = [], mesh.comm("ep"), min(LAST, config.steps)
    for step in range(config.steps):
        if step == config.steps - last:
            ep.traffic.reset()
        drops.append(train_step(world, state, config, text, step)["drop_rate"])
    sent = ep.traffic.sent_bytes / last
    return evaluate(world, state, config, held_out), sum(drops[-last:]) / last, sent / 1e3


def table(rows: Sequence[Routed]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        "| changed | to | held-out loss | its range | dropped | kB a step over ep |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.panel} | {r.label} | {r.loss:.2f} | {r.lowest:.2f} to {r.highest:.2f} | {r.drops:.1%} "
        f"| {r.kilobytes:,.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


def kept() -> list[Routed]:
    """Return the figures of the runs that docs/routing.md shows."""
    stored = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Routed(**row) for row in stored["run"]]


def as_toml(rows: Sequence[Routed]) -> str:
    """Return the text that `kept` reads."""
    parts = []
    for row in rows:
        values = (f"{key} = {value!r}".replace("'", '"') for key, value in row._asdict().items())
        parts.append("[[run]]\n" + "\n".join(values))
    return "\n\n".join(parts) + "\n"
