"""Pipelines: schedules as data, one rule, and whatever follows from the two.

schedule.py      Action, Schedule, and `needs`, the one dependency rule
fill_drain.py    GPipe and breadth-first: every forward, then every backward
alternating.py   1F1B and interleaved 1F1B
zero_bubble.py   ZB-H1 and ZB-H2: the backward split in two
v_shaped.py      ZB-V and DualPipe-V: two chunks a rank, placed as a V
costs.py         how long an action takes
timeline.py      when each action ran: bubbles, live activations, critical path
simulate.py      from a schedule and costs to a timeline
deadlock.py      what a schedule that can't run is refused with
search.py        zb_auto: the zero-bubble search under a memory limit
lower.py         from a schedule to programs with sends and receives, in an order that can't hang
validate.py      refuse what could not train
registry.py      every schedule by name
pipedream.py     the asynchronous ancestor: stale weights, and stashing
partition.py     cut a model into stages
stage.py         one stage at work: forward, backward, its two halves
mailbox.py       results on their way between ranks
tied.py          a weight that the first and the last stage share
batch.py         a batch cut into microbatches
execute.py       Pipeline: one executor, which obeys any schedule
measure.py       a run's own timeline, to be drawn beside the simulated one
emulate.py       stages that sleep: a schedule on fewer cores than ranks
"""

from minipar.pipeline.alternating import interleaved, one_f_one_b
from minipar.pipeline.costs import Costs
from minipar.pipeline.deadlock import Deadlock
from minipar.pipeline.execute import Pipeline
from minipar.pipeline.fill_drain import breadth_first, gpipe
from minipar.pipeline.lower import lower
from minipar.pipeline.measure import measured, measured_costs
from minipar.pipeline.partition import balance, partition
from minipar.pipeline.registry import SCHEDULES, make_schedule
from minipar.pipeline.schedule import Action, Schedule, needs
from minipar.pipeline.search import zb_auto
from minipar.pipeline.simulate import simulate
from minipar.pipeline.timeline import Timeline
from minipar.pipeline.v_shaped import dualpipe_v, zb_v
from minipar.pipeline.validate import validate
from minipar.pipeline.zero_bubble import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Deadlock",
    "Pipeline",
    "Schedule",
    "Timeline",
    "balance",
    "breadth_first",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "lower",
    "make_schedule",
    "measured",
    "measured_costs",
    "needs",
    "one_f_one_b",
    "partition",
    "simulate",
    "validate",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
