"""What a page loads is minipar, whole as far as it needs no torch: an interpreter that has nothing else answers from it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import pytest

from minipar.config.choices import CHOSEN
from minipar.learn.puzzles.registry import PUZZLES
from minipar.schedules import SCHEDULES
from website.bundle import write_bundle

ISOLATED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from minipar.config.choices import CHOSEN
from website.answers import answer
import minipar
found = {
    "file": minipar.__file__,
    "names": {field: {name: kind.extras().get(name) for name in kind} for field, kind in CHOSEN.items()},
    "answers": [json.loads(answer(name, json.dumps(request))) for name, request in json.load(sys.stdin)],
    "torch": "torch" in sys.modules,
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    write_bundle(folder / "minipar.zip")
    with zipfile.ZipFile(folder / "minipar.zip") as archive:
        archive.extractall(folder / "minipar")
    return folder / "minipar"


def asked(folder, *requests) -> dict:
    """Answers of an interpreter without site-packages, as that of a page is."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ISOLATED, str(folder)],
        input=json.dumps(requests), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_same_sources_give_the_same_bundle(unpacked):
    first = unpacked.with_suffix(".zip").read_bytes()
    write_bundle(unpacked.with_name("again.zip"))
    assert unpacked.with_name("again.zip").read_bytes() == first


def test_the_bundle_knows_every_choice_by_name(unpacked):
    found = asked(unpacked)
    assert found["file"] == str(unpacked / "minipar" / "__init__.py")
    assert not found["torch"]
    for field, kind in CHOSEN.items():
        ours = {name: package for name, package in kind.extras().items() if package == "minipar"}
        assert found["names"][field] == dict.fromkeys(kind.own) | ours


def test_every_schedule_is_answered_from_the_bundle(unpacked):
    requests = [("pipeline", {"schedule": name, "p": 4, "m": 8}) for name in SCHEDULES]
    for (_, request), answer in zip(requests, asked(unpacked, *requests)["answers"], strict=True):
        name = request["schedule"]
        assert answer.get("name") == ("1f1b, at most 2 live" if name == "offloaded" else name), answer


def test_the_planner_answers_from_the_bundle(unpacked):
    job = {"model": "llama-7b", "gpus": 16, "machine": "h100", "seq": 4096, "batch": 64}
    plan, layout = asked(unpacked, ("plan", job), ("layout", {"dp": 4, "pp": 2, "tp": 8}))["answers"]
    assert "error" not in plan
    assert "error" not in layout


def test_puzzles_are_judged_from_the_bundle(unpacked):
    requests = [("puzzle", {"puzzle": name, "program": one.answer}) for name, one in PUZZLES.items()]
    for (_, request), answer in zip(requests, asked(unpacked, *requests)["answers"], strict=True):
        assert answer["right"], (request["puzzle"], answer["text"])
