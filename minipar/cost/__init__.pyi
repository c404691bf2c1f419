# The public names of this package, imported when asked for: read by type checkers.
from minipar.cost.layout import Implementation as Implementation
from minipar.cost.layout import Job as Job
from minipar.cost.layout import Layout as Layout
from minipar.cost.layout import parse_layout as parse_layout
from minipar.cost.machines import MACHINES as MACHINES
from minipar.cost.machines import Machine as Machine
from minipar.cost.machines import find_machine as find_machine
from minipar.cost.memory import model_state_bytes as model_state_bytes
from minipar.cost.memory import rank_memory as rank_memory
from minipar.cost.memory import worst_rank_memory as worst_rank_memory
from minipar.cost.model_table import MODELS as MODELS
from minipar.cost.model_table import find_model as find_model
from minipar.cost.models import ModelShape as ModelShape
from minipar.cost.planner import plan as plan
from minipar.cost.timing import step_time as step_time
from minipar.cost.traffic import step_traffic as step_traffic
