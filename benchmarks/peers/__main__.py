"""`python -m benchmarks.peers --picotron PATH --nanogpt PATH [--quick]`"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.harness import print_table
from benchmarks.peers import nanogpt, picotron


@dataclass(frozen=True)
class Options:
    """Time our training steps and those of other programs in turn: the same weights, batch and mesh, on the CPU."""

    picotron: Path | None = None
    """a checkout of picotron"""
    nanogpt: Path | None = None
    """a checkout of nanoGPT"""
    quick: bool = False
    """fewer meshes and repetitions"""


def main(options: Options) -> None:
    if options.picotron is None and options.nanogpt is None:
        sys.exit("no program to compare with: give --picotron PATH, --nanogpt PATH, or both")
    for module, path in ((picotron, options.picotron), (nanogpt, options.nanogpt)):
        if path is None:
            continue
        try:
            print_table((module.__doc__ or "").splitlines()[0], module.rows(path, options.quick))
        except ValueError as error:
            sys.exit(str(error))


main(tyro.cli(Options, prog="python -m benchmarks.peers"))
