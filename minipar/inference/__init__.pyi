# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .apart import serve_apart as serve_apart
from .blocks import BlockPool as BlockPool
from .draft_choice import DraftChoice as DraftChoice
from .engine import Engine as Engine
from .engine import Options as Options
from .engine import Result as Result
from .engine import as_measured as as_measured
from .engine import one_second as one_second
from .metrics import Metrics as Metrics
from .metrics import metrics_of as metrics_of
from .prefix import PrefixCache as PrefixCache
from .request import Request as Request
from .scheduler import Scheduler as Scheduler
from .speculative import ModelDraft as ModelDraft
from .speculative import NGramDraft as NGramDraft
