"""Write docs/generated/routing.md: small mixtures of experts, trained with one routing option changed at a time.

    python -m benchmarks.guide.routing benchmarks/guide/routing.toml    # measures again: two ranks, ten minutes

The page's figures are in routing.toml. `python -m minipar.visualize.routing` draws them.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.runtime.launch import run
from minipar.train.data.text import Text, hold_out, load_text
from minipar.train.parallelize import parallelize
from minipar.train.step import evaluate, train_step
from minipar.visualize.routing import Routed

MODEL = ModelConfig(
    dim=32, num_layers=2, num_heads=2, hidden_dim=64, max_seq_len=64, num_experts=8, top_k=1, capacity_factor=1.25,
    moe_every=1,
)  # fmt: skip
BASE = TrainConfig(model=MODEL, dp=2, ep=2, seq_len=64, batch_size=16, eval_every=1)
LAST = 20  # drops and bytes are means over the last steps of a run

# Option -> value -> the fields of MODEL that are changed.
CHANGES: dict[str, dict[str, dict[str, object]]] = {
    "experts a token": {"1": {}, "2": {"top_k": 2}, "4": {"top_k": 4}},
    "capacity factor": {
        "0.75": {"capacity_factor": 0.75},
        "1": {"capacity_factor": 1.0},
        "1.25": {},
        "2": {"capacity_factor": 2.0},
        "none": {"capacity_factor": None},
    },
    "router's noise": {
        "none": {},
        "jitter 0.1": {"jitter": 0.1},
        "jitter 0.5": {"jitter": 0.5},
        "noisy": {"router": "noisy_top_k"},
    },
    "z-loss's weight": {
        "0": {"z_coef": 0.0},
        "0.001": {},
        "0.01": {"z_coef": 0.01},
        "0.1": {"z_coef": 0.1},
    },
}


class Stored(NamedTuple):
    """The measurements in routing.toml, and the steps and seeds of each run."""

    steps: int
    seeds: int
    runs: list[Routed]


def measure(
    steps: int,
    seeds: int,
    changes: Mapping[str, Mapping[str, Mapping[str, object]]] = CHANGES,
    tell: Callable[[str], None] = print,
) -> list[Routed]:
    """Train each setting for `steps` steps on two ranks, with each seed. Equal settings are trained once."""
    found: dict[ModelConfig, tuple[float, float, float, float, float]] = {}
    text, held_out = hold_out(load_text(None), BASE.seq_len)
    rows = []
    for panel, labels in changes.items():
        for label, changed in labels.items():
            model = replace(MODEL, **changed)  # type: ignore[arg-type]  # values of ModelConfig's fields
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


def padded_kilobytes(model: ModelConfig) -> float:
    """Return the kB that a rank sends over ep in a step if experts have a capacity, to which their rows are padded.

    Half of R rows of D float32 go to the other rank, 4 times a layer: to the experts and back, forward and backward. The
    number of rows for each expert, int64, is sent to the other rank first.
    """
    groups = BASE.batch_size // BASE.dp * BASE.seq_len // (model.group_tokens or BASE.seq_len)
    rows = model.num_experts * groups * model.capacity(model.group_tokens or BASE.seq_len)
    return model.num_layers * (4 * rows * model.dim * 4 // 2 + 8 * model.num_experts) / 1e3


def stored() -> Stored:
    """Return the measurements that docs/generated/routing.md shows."""
    found = tomllib.loads((files("benchmarks.guide") / "routing.toml").read_text(encoding="utf-8"))
    return Stored(found["steps"], found["seeds"], [Routed(**row) for row in found["run"]])


def measured_text(measured: Stored) -> str:
    """Return the text of routing.toml."""
    parts = [f"steps = {measured.steps}\nseeds = {measured.seeds}"]
    for row in measured.runs:
        parts.append("[[run]]\n" + "\n".join(f"{key} = {json.dumps(v)}" for key, v in row._asdict().items()))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """Return the text of docs/generated/routing.md."""
    steps, seeds, runs = stored()
    lines = [
        "# What a router's options cost",
        "",
        f"One option of a mixture of experts is changed at a time. The model has {MODEL.num_layers} layers of width "
        f"{MODEL.dim} with {MODEL.num_experts} experts each. Where the table does not say otherwise, a token has "
        f"{MODEL.top_k} expert, the capacity factor is {MODEL.capacity_factor}, the weight of the z-loss is "
        f"{MODEL.z_coef:g}, and the router has no noise. Two ranks hold half of the experts each, and train each setting "
        f"with {seeds} seeds, for {steps} steps of {BASE.batch_size * BASE.seq_len:,} tokens.",
        "",
        "![Loss, dropped choices and bytes, for each value of four options](routing.png)",
        "",
        "(`python -m minipar.visualize.routing` draws this picture. Dots are means over the seeds; lines reach from the "
        "lowest loss to the highest.)",
        "",
        "| option | value | held-out loss | over the seeds | dropped choices | kB a rank sends over ep in a step |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.panel} | {r.label} | {r.loss:.3f} | {r.lowest:.3f} to {r.highest:.3f} | {r.drops:.1%} | {r.kilobytes:,.0f} |"
        for r in runs
    ]
    lines += ["", *READING, "", "Written by `python -m benchmarks.guide docs/generated`."]
    return "\n".join(lines) + "\n"


READING = (
    "- **Bytes** are proportional to the experts a token and to the capacity factor, because the rows of an expert are "
    "padded to its capacity. Without a capacity, only rows that exist are sent. Noise and z-loss change no byte.",
    "- **Dropped choices** are those beyond an expert's capacity. A larger factor drops fewer of them. So do more experts "
    "a token: its choices are different experts, which evens out the loads.",
    "- **The loss** of so small a model, after so few steps, differs between seeds as much as between settings. Only a "
    "z-loss of weight 0.1 is worse with every seed. The picture shows what the options do; it does not rank their values "
    "for a large model.",
)


def main(path: Path, steps: int = 300, seeds: int = 3) -> None:
    """Measure every setting, and write the file that `stored` reads."""
    path.write_text(measured_text(Stored(steps, seeds, measure(steps, seeds))), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
