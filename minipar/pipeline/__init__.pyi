# The public names of this package, imported when asked for: read by type checkers.
from .execute import Pipeline as Pipeline
from .measure import measured as measured
from .measure import measured_costs as measured_costs
from .partition import balance as balance
from .partition import partition as partition
from minipar.schedules import *
