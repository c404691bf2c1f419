"""torch.distributed.pipelining's ScheduleGPipe and Schedule1F1B.

The loss is divided by the number of microbatches here. scale_grads=True divides .grad at the end, and with it what an
earlier step left there.
"""

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from minipar.spec import conventions

CONVENTIONS = conventions("header", "p microbatches or more", "contiguous")


def step(schedule, comm, module, loss_fn, inputs, targets, m, shape, dtype):
    between = torch.empty(shape, dtype=dtype).requires_grad_()
    first = between if inputs is None else inputs.chunk(m)[0]
    stage = PipelineStage(
        module,
        comm.rank,
        comm.size,
        comm.device,
        input_args=first,
        output_args=between,
        group=comm.process_group(),
    )
    losses = []
    runner = schedule(stage, m, loss_fn=lambda y, target: loss_fn(y, target) / m, scale_grads=False)
    runner.step(*(() if inputs is None else (inputs,)), target=targets, losses=losses)
    return sum(loss.detach() for loss in losses) if losses else None


@CONVENTIONS
def gpipe(*args):
    return step(ScheduleGPipe, *args)


@CONVENTIONS
def one_f_one_b(*args):
    return step(Schedule1F1B, *args)
