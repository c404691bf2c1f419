"""Schedules for torch's pipeline runtime: the CSV that torch.distributed.pipelining reads."""

from __future__ import annotations

from minipar.schedules.schedule import Schedule


def to_torch(schedule: Schedule) -> str:
    """Return a CSV with one row per rank. 2F0 means stage 2, forward, microbatch 0; I and W are a backward's halves.

    torch inserts the communication. To run the schedule on stages of torch.distributed.pipelining:

        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
        runtime = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss_fn)
        runtime._load_csv(path)                                   the file with this text
        runtime.step(inputs)                                      or runtime.step(target=targets) on the last stage's rank

    Raises ValueError for a schedule with slices or with two copies of the model, which torch's runtime does not support.
    """
    if schedule.slices > 1:
        raise ValueError(
            f"slices={schedule.slices}: torch's runtime keeps no keys and values between slices; use slices=1"
        )
    if schedule.copies > 1:
        raise ValueError(
            f"copies={schedule.copies} of the model: torch's runtime has one; use a schedule with copies=1"
        )
    rows = (",".join(f"{stage}{op}{k}" for op, stage, k in actions) for actions in schedule.actions)
    return "".join(f"{row}\n" for row in rows)
