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

    Raises ValueError for a schedule whose rules are not the plain ones, since torch's runtime has no others.
    """
    if type(schedule) is not Schedule:
        raise ValueError(
            f"schedule {schedule.name} is a {type(schedule).__name__}: torch's runtime runs whole microbatches, kept on "
            "the device, of one copy of the model; use a schedule of these, such as 1f1b"
        )
    rows = (",".join(f"{stage}{op}{k}" for op, stage, k in actions) for actions in schedule.actions)
    return "".join(f"{row}\n" for row in rows)
