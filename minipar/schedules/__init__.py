"""Pipeline schedules as data, one dependency rule, and what follows from both. Imports neither torch nor numpy.

In reading order:

schedule.py     Action, Schedule, and `needs`, the one dependency rule
gpipe.py        GPipe and breadth-first: every forward, then every backward
one_f_one_b.py  1F1B and interleaved 1F1B
zero_bubble.py  ZB-H1 and ZB-H2: the backward split in two
v_shaped.py     ZB-V and DualPipe-V: two chunks per rank, placed as a V
costs.py        seconds per action
timeline.py     start and end of each action: bubbles, live activations, critical path
simulate.py     compute the timeline of a schedule under given costs
deadlock.py     the error for a schedule that cannot run to its end
search.py       zb_auto: the zero-bubble search under a memory limit
lower.py        from a schedule to programs with sends and receives, in an order that cannot hang
validate.py     refuse a schedule that could not train
torch_csv.py    a schedule as torch's pipeline runtime reads it
registry.py     every schedule by name; `minipar.extras.schedules` has more schedules
"""

from minipar.schedules.costs import Costs
from minipar.schedules.deadlock import Deadlock
from minipar.schedules.gpipe import breadth_first, gpipe
from minipar.schedules.lower import lower
from minipar.schedules.one_f_one_b import interleaved, one_f_one_b
from minipar.schedules.registry import SCHEDULES, make_schedule
from minipar.schedules.schedule import Action, Schedule, needs
from minipar.schedules.search import zb_auto
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import Timeline
from minipar.schedules.torch_csv import to_torch
from minipar.schedules.v_shaped import dualpipe_v, zb_v
from minipar.schedules.validate import validate
from minipar.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Deadlock",
    "Schedule",
    "Timeline",
    "breadth_first",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "lower",
    "make_schedule",
    "needs",
    "one_f_one_b",
    "simulate",
    "to_torch",
    "validate",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
