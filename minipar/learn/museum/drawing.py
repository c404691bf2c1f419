"""A faulty drawing of a pipeline, as slots of a grid, and a check that each action comes after the actions it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from minipar.learn.museum.exhibit import Exhibit, Finding
from minipar.schedules import Action, Costs, gpipe, needs, simulate

Drawing = Mapping[Action, int]  # action -> its slot


def two_stages_at_once() -> Drawing:
    """Four forwards drawn in three slots, so that stages 1 and 2 work on the same microbatch at the same time."""
    return {Action("F", stage, 0): slot for stage, slot in enumerate((0, 1, 1, 2))}


def four_stages_in_turn() -> Drawing:
    """The forwards of GPipe on four stages, as simulated, each one slot long."""
    spans = simulate(gpipe(4, 1), Costs(F=1, I=0.5, W=0.5)).spans
    return {action: int(start) for action, (start, _) in spans.items() if action.op == "F"}


def first_too_early(drawing: Drawing) -> str | None:
    """Describe the first action that is drawn before the end of an action that it needs; None if there is none."""
    num_stages = 1 + max(action.stage for action in drawing)
    for action, slot in sorted(drawing.items(), key=lambda item: (item[1], item[0])):
        for need in needs(action, num_stages):
            if need in drawing and drawing[need] >= slot:
                return (
                    f"{action.op} of microbatch {action.microbatch} is drawn on stage {action.stage} in slot {slot}, and "
                    f"needs that of stage {need.stage}, which ends after slot {drawing[need]}"
                )
    return None


@dataclass(frozen=True)
class DrawingExhibit(Exhibit):
    """A drawing of an impossible schedule, and a drawing of a correct one."""

    wrong: Callable[[], Drawing]
    right: Callable[[], Drawing]

    def run(self, curve: bool = True) -> Finding:
        slots = 1 + max(self.wrong().values())
        return Finding(
            f"a drawing of {slots} slots that looks like a pipeline",
            first_too_early(self.wrong()) or "nothing",
        )

    def run_without_fault(self) -> bool:
        return first_too_early(self.right()) is None
