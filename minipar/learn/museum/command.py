"""`minipar museum`: lists the exhibits, runs one, or shows only its symptom for the user to guess the cause."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:
    from minipar.learn.museum.exhibit import Exhibit

Draw = Callable[[dict[str, list[float]], Path], str]
Work = Callable[[], None]
AXES = "dp, zero, tp, sp, pp, ep, cp, loss, data, messages, cache, batching or sampling"


def museum_command(draw: Draw) -> Callable[..., Work]:
    """Return the command. `draw(losses, path)` draws the losses with and without the fault, and returns the path."""

    def command(
        name: tyro.conf.Positional[str] = "",
        blind: bool = False,
        out: Path = Path("runs/museum"),
        seed: int | None = None,
    ) -> Work:
        """Run real bugs of training and inference: what their authors saw, which check finds them, which rule avoids them.

        Args:
            name: the exhibit to run; without one, all are listed by symptom.
            blind: show only what the bug's author saw, and what verify says; then ask which mesh axis has the bug.
            out: the folder for the picture of the loss.
            seed: with --blind and no name, the seed that chooses the exhibit; random if not given.
        """
        if blind:
            return partial(_blind, name, seed)
        return partial(_run, name, out, draw) if name else _list

    return command


def _list() -> None:
    from minipar.learn.museum.gallery import GALLERY

    width = max(len(exhibit.name) for exhibit in GALLERY) + 1
    for symptom in dict.fromkeys(exhibit.symptom for exhibit in GALLERY):
        print(f"\n{symptom}")
        for exhibit in GALLERY:
            if exhibit.symptom == symptom:
                print(f"  {exhibit.name:{width}}{exhibit.title}")


def _run(name: str, out: Path, draw: Draw) -> None:
    from minipar.learn.museum.gallery import find

    exhibit = find(name)
    print(f"{exhibit.title}\n")
    print(_filled(exhibit.story))
    finding = exhibit.run()
    print("\nwhat one sees:   " + _filled(finding.symptom, 17).lstrip())
    print("what finds it:   " + _filled(finding.proof, 17).lstrip())
    if finding.losses:
        print(f"the losses:      {draw(finding.losses, out / f'{name}.png')}")
    _tell(exhibit)


def _tell(exhibit: "Exhibit") -> None:
    print("why tests miss:  " + _filled(exhibit.missed, 17).lstrip())
    print("the rule:        " + _filled(exhibit.rule, 17).lstrip())
    print("seen in:         " + _filled(exhibit.real, 17).lstrip())


def _blind(name: str, seed: int | None) -> None:
    from minipar.learn.museum.gallery import GALLERY, find

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
