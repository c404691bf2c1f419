# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .all_specifications import SPECIFICATIONS as SPECIFICATIONS
from .all_specifications import check as check
from .convention import CONVENTIONS as CONVENTIONS
from .convention import conventions as conventions
from .specification import Report as Report
from .specification import Specification as Specification
from .specification import Stage as Stage
from .specification import Verdict as Verdict
