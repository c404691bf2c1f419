"""Pipeline schedules as data, one dependency rule, and everything computed from the two. Imports neither torch nor numpy.

In reading order:

schedule.py     Action, Schedule, and `needs`, the one dependency rule
gpipe.py        GPipe and breadth-first: every forward, then every backward
one_f_one_b.py  1F1B and interleaved 1F1B
zero_bubble.py  ZB-H1 and ZB-H2: the backward split in two
v_shaped.py     ZB-V and DualPipe-V: two chunks per rank, placed as a V
two_directions.py  Chimera and DualPipe: two copies of the model, run from both ends
building_block.py  V-Min and V-Half: memory below 1F1B's, for longer bubbles
waves.py        Hanayo: chunks placed as several Vs
sequence_slices.py  TeraPipe and Seq1F1B: samples cut into slices of tokens, and where to cut
costs.py        seconds per action
timeline.py     start and end of each action: bubbles, live activations, critical path
simulate.py     compute the timeline of a schedule under given costs
deadlock.py     the error for a schedule that cannot run to its end
search.py       zb_auto: the zero-bubble search under a memory limit
optimal.py      the best schedule there is, by exact search, for small p and m
lower.py        from a schedule to programs with sends and receives, in an order that cannot hang
validate.py     refuse a schedule that could not train
torch_csv.py    a schedule as torch's pipeline runtime reads it
registry.py     every schedule by name
"""

from minipar.schedules.building_block import v_half, v_min
from minipar.schedules.costs import Costs
from minipar.schedules.deadlock import Deadlock
from minipar.schedules.gpipe import breadth_first, gpipe
from minipar.schedules.lower import lower
from minipar.schedules.one_f_one_b import interleaved, one_f_one_b
from minipar.schedules.optimal import optimal
from minipar.schedules.registry import SCHEDULES, make_schedule
from minipar.schedules.schedule import Action, Schedule, needs
from minipar.schedules.search import zb_auto
from minipar.schedules.sequence_slices import seq1f1b, slice_tokens, terapipe
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import Timeline
from minipar.schedules.torch_csv import to_torch
from minipar.schedules.two_directions import chimera, dualpipe, unfolded
from minipar.schedules.v_shaped import dualpipe_v, zb_v
from minipar.schedules.validate import validate
from minipar.schedules.waves import hanayo
from minipar.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Deadlock",
    "Schedule",
    "Timeline",
    "breadth_first",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "gpipe",
    "hanayo",
    "interleaved",
    "lower",
    "make_schedule",
    "needs",
    "one_f_one_b",
    "optimal",
    "seq1f1b",
    "simulate",
    "slice_tokens",
    "terapipe",
    "to_torch",
    "unfolded",
    "v_half",
    "v_min",
    "validate",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
