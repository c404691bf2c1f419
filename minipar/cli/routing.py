"""`minipar routing`."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

from functools import partial
from pathlib import Path

from minipar.cli.parse import Work
from minipar.config.check_paths import require_writable


def routing_command(
    steps: int = 300, seeds: int = 1, out: Path = Path("runs/routing.png"), toml: Path | None = None
) -> Work:
    """Train small mixtures of experts, each with one routing option changed, and draw loss, drops, and bytes.

    The options are the experts a token uses, the capacity factor, the router's noise, and the weight of the z-loss.
    Two local ranks, a minute or two a hundred steps.

    Args:
        steps: optimizer steps of each run.
        seeds: runs of each setting, with seeds 0, 1 and so on; the loss is their mean, and its range is drawn.
        out: the picture file, a .png, .svg or .pdf.
        toml: a file for the figures as text; none: they are only printed.
    """
    for name, value in (("steps", steps), ("seeds", seeds)):
        if value < 1:
            raise ValueError(f"{name}={value}; use 1 or more")
    for path in (out, *([] if toml is None else [toml])):
        require_writable(path.parent)
    return partial(_routing, steps, seeds, out, toml)


def _routing(steps: int, seeds: int, out: Path, toml: Path | None) -> None:
    from minipar.learn.guide.routing import as_toml, measure, table
    from minipar.support.atomic_files import write_whole
    from visualize.expert import draw_routing

    rows = measure(steps, seeds)
    print(f"\n{table(rows)}\n")
    if toml is not None:
        write_whole(toml, as_toml(rows))
    print(f"wrote {draw_routing([row._asdict() for row in rows], out)}")
