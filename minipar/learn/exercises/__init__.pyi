# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .check import Result as Result
from .check import check as check
from .folder import started as started
from .registry import EXERCISES as EXERCISES
from .registry import Exercise as Exercise
from .registry import find_exercise as find_exercise
