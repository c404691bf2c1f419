"""`minipar spec`."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

from functools import partial
from typing import Literal

import tyro

from minipar.cli.parse import Work


def spec_command(
    name: tyro.conf.Positional[str] = "",
    implementation: tyro.conf.Positional[str] = "",
    stages: tuple[str, ...] = (),
    ranks: tuple[int, ...] = (),
    backend: Literal["gloo", "nccl", "auto"] = "gloo",
) -> Work:
    """Judge anybody's code: say what a specification asks, and which stage an implementation fails, and why.

    Exits 0 if the implementation is right, 1 if not, 2 on a bad request.

    Args:
        name: the specification; without it, all are listed with their signatures.
        implementation: FILE.py[:NAME] or PACKAGE.MODULE[:NAME]; without it, what is asked is printed, stage by stage.
            Without NAME it is what the signature names.
        stages: only these stages.
        ranks: numbers of ranks of drawn and varied cases, in place of the usual ones.
        backend: gloo: tensors are on the CPU; nccl: on GPUs, one a rank; auto: nccl where it can serve every rank.
    """
    return partial(_spec, name, implementation, stages, ranks, backend)


def _spec(
    name: str, implementation: str, stages: tuple[str, ...], ranks: tuple[int, ...], backend: str
) -> None:
    from minipar.spec.all_specifications import SPECIFICATIONS, check, find_specification

    if not name:
        for one in SPECIFICATIONS.values():
            print(f"{one.name:20} {one.requirement}\n{'':20} {one.signature}")
    elif not implementation:
        print(find_specification(name).words)
    else:
        report = check(name, implementation, stages or None, ranks or None, backend)  # type: ignore[arg-type]
        print(report)
        raise SystemExit(0 if report.ok else 1)
