"""`minipar museum`: list the exhibits, run one, or be shown only its symptom."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import tyro

AXES = "dp, zero, tp, sp, pp, ep, cp, loss, data or messages"


def museum_command(draw: Callable):
    """Return the command. `draw(losses, path)` draws the loss with the fault and without, and returns the path."""

    def command(
        name: tyro.conf.Positional[str] = "",
        blind: bool = False,
        out: Path = Path("runs/museum"),
        seed: int | None = None,
    ):
        """Run real bugs of distributed training: what their authors saw, what finds them, and the rule to keep.

        Args:
            name: the exhibit to run; without one, all are listed by symptom.
            blind: show only what its author saw, and what verify says; then ask for the axis.
            out: the folder for the picture of the loss.
            seed: which exhibit --blind takes where no name is given; drawn if not given.
        """
        if blind:
            return partial(_blind, name, seed)
        return partial(_run, name, out, draw) if name else _list

    return command


def _list() -> None:
    from minipar.museum.gallery import GALLERY

    for symptom in dict.fromkeys(exhibit.symptom for exhibit in GALLERY):
        print(f"\n{symptom}")
        for exhibit in GALLERY:
            if exhibit.symptom == symptom:
                print(f"  {exhibit.name:26}{exhibit.title}")


def _run(name: str, out: Path, draw: Callable) -> None:
    from minipar.museum.gallery import find

    exhibit = find(name)
    print(f"{exhibit.title}\n")
    print(_filled(exhibit.story))
    finding = exhibit.run()
    print("\nwhat one sees:   " + _filled(finding.symptom, 17).lstrip())
    print("what finds it:   " + _filled(finding.proof, 17).lstrip())
    if finding.losses:
        print(f"the losses:      {draw(finding.losses, out / f'{name}.png')}")
    _tell(exhibit)


def _tell(exhibit) -> None:
    print("why tests miss:  " + _filled(exhibit.missed, 17).lstrip())
    print("the rule:        " + _filled(exhibit.rule, 17).lstrip())
    print("seen in:         " + _filled(exhibit.real, 17).lstrip())


def _blind(name: str, seed: int | None) -> None:
    from minipar.museum.gallery import GALLERY, find

    exhibit = find(name) if name else Random(seed).choice(GALLERY)
    finding = exhibit.run()
    print(f"symptom: {exhibit.symptom}. {finding.symptom}\n")
    print(finding.table or _filled(finding.proof))
    if sys.stdin.isatty():
        given = input(f"\nwhich axis, {AXES}? ").strip().lower()
        print("right" if given == exhibit.axis else f"no, {exhibit.axis}")
        input("what is the cause? say it, then press Enter ")
    print(f"\n{exhibit.title} ({exhibit.axis}; minipar museum {exhibit.name})\n")
    print(_filled(exhibit.story))
    _tell(exhibit)


def _filled(text: str, indent: int = 0) -> str:
    lines = text.splitlines() or [""]
    return "\n".join(
        textwrap.fill(line, 100, initial_indent=" " * indent, subsequent_indent=" " * indent)
        for line in lines
    )
