"""A record of missed questions, kept in a file of the user's data folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

from platformdirs import user_data_path

from minipar.support.atomic_files import write_whole


def default_path() -> Path:
    return user_data_path("minipar") / "quiz.json"


class Progress:
    """Counts of how often each question was asked, and how often in a row it was missed. Every answer is saved at once.

    A file that cannot be read is not touched: `problem` then says so in a sentence, and answers go to a file next to it.
    """

    def __init__(self, path: Path):
        self.path, self.problem = path, None
        try:
            self._entries = _read(path)
        except FileNotFoundError:
            self._entries = {}
        except (OSError, ValueError) as error:
            self.path, self._entries = path.with_suffix(".new.json"), {}
            self.problem = (
                f"{path} cannot be read ({error}); it is left as it is, and answers go to {self.path}"
            )

    def missed(self, name: str) -> int:
        return self._entries.get(name, {}).get("missed", 0)

    def asked(self, name: str) -> int:
        return self._entries.get(name, {}).get("asked", 0)

    def record(self, name: str, right: bool) -> None:
        missed = 0 if right else self.missed(name) + 1
        self._entries[name] = {"asked": self.asked(name) + 1, "missed": missed}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self._entries, indent=1))
        except OSError as error:
            self.problem = f"{self.path} cannot be written ({error}); what you miss is not remembered"

    def order(self, names: Iterable[str], rng: Random) -> list[str]:
        """Return the names in the order to ask them: missed questions, then new ones, then the rest, each shuffled."""
        return sorted(names, key=lambda name: (-self.missed(name), self.asked(name), rng.random()))


def _read(path: Path) -> dict[str, dict[str, int]]:
    entries = json.loads(path.read_text())
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and {"asked", "missed"} <= entry.keys() for entry in entries.values()
    ):
        raise ValueError("it is not a record of quiz answers")
    return entries
