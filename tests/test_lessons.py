"""The lessons' form: one template for all, nothing that leads nowhere. `make test` also runs them."""

import json
import re
from pathlib import Path
from pydoc import locate

import pytest

from minipar.learn.exercises.registry import EXERCISES
from minipar.learn.ideas import lesson_head
from minipar.learn.museum.gallery import EXHIBITS

FOLDER = Path(__file__).parent.parent / "lessons"
LESSONS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
NUMBERS = [path.name[:2] for path in LESSONS]
PAGES = sorted([*FOLDER.rglob("*.ipynb"), *FOLDER.rglob("*.md")])
HEAD = re.compile(
    r"# (?P<number>\d\d) · (?P<title>\S.*)\n\n"
    r"\*(?P<minutes>\d+) minutes · needs (?P<needs>.+) · next (?P<next>.+)\*\n\n\S"
)
LINK = re.compile(r"\[[^\]]*\]\(([^)]+)\)")
FILE = re.compile(r"(?<![\w./-])((?:minipar|visualize|tests|docs|benchmarks)/[\w./-]*\w)")
NAME = re.compile(r"`(minipar(?:\.\w+)+)")
SECTIONS = ("The problem", "By hand", "Where it breaks", "Your turn", "In the interview", "Further reading")
BOX = "In torch"  # anywhere between "By hand" and "Your turn"
ALL_TORCH = "15"  # the lesson that is nothing but such boxes; the others are its by-hand versions
WORDS_A_MINUTE, CODE_LINES_A_MINUTE, PRINTED_LINES_A_MINUTE, PICTURES_A_MINUTE = 180, 12, 15, 1
MOST_MINUTES = 40
FENCED = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def cells_of(path: Path) -> list[dict]:
    return [cell | {"source": "".join(cell["source"])} for cell in json.loads(path.read_text())["cells"]]


def text_of(cells: list[dict], kind: str) -> str:
    return "\n\n".join(cell["source"] for cell in cells if cell["cell_type"] == kind)


def sections_of(text: str) -> list[str]:
    return re.findall(r"^## (.+)$", text, re.MULTILINE)


def minutes_to_read(cells: list[dict]) -> float:
    """Count prose, code, what cells print, and pictures, each at its own speed. Shown sources count as code.

    The line of links at the head is not read.
    """
    shown = shown_by(cells)
    head = lesson_head(cells[0]["source"][2:4])
    read = text_of(cells, "markdown").replace(head, "")
    prose = "\n\n".join([read, *(FENCED.sub("", text) for text in shown)])
    code = "\n".join([text_of(cells, "code"), *(body for text in shown for body in FENCED.findall(text))])
    return (
        len(prose.split()) / WORDS_A_MINUTE
        + num_lines(code) / CODE_LINES_A_MINUTE
        + num_lines("\n".join(printed_by(cells))) / PRINTED_LINES_A_MINUTE
        + num_pictures(cells) / PICTURES_A_MINUTE
    )


def num_lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def outputs_of(cells: list[dict]) -> list[dict]:
    return [output for cell in cells for output in cell.get("outputs", ())]


def num_pictures(cells: list[dict]) -> int:
    """Count the pictures that cells draw and those that texts show."""
    drawn = [
        key for output in outputs_of(cells) for key in output.get("data", ()) if key.startswith("image/")
    ]
    return len(drawn) + text_of(cells, "markdown").count("![")


def shown_by(cells: list[dict]) -> list[str]:
    """The Markdown that code cells show, such as the library's sources."""
    shown = [output.get("data", {}).get("text/markdown", "") for output in outputs_of(cells)]
    return ["".join(text) for text in shown if text]


def printed_by(cells: list[dict]) -> list[str]:
    """The stored texts of code cells: what they print, and results that are shown as text alone."""
    outputs = outputs_of(cells)
    texts = [
        output["data"]["text/plain"] for output in outputs if list(output.get("data", ())) == ["text/plain"]
    ]
    return ["".join(text) for text in (*texts, *(output["text"] for output in outputs if "text" in output))]


def faults(number: str, cells: list[dict], folder: Path = FOLDER) -> list[str]:
    """Everything in which these cells are no lesson `number` of the folder, in words."""
    prose, found = text_of(cells, "markdown"), []
    head = HEAD.match(cells[0]["source"])
    if not head:
        return ["the first cell is no '# NN · title', '*M minutes · needs ... · next ...*', and a text"]
    if head["number"] != number:
        found.append(f"the title says {head['number']}")
    minutes = minutes_to_read(cells)
    if abs(int(head["minutes"]) - minutes) > 3:
        found.append(f"{head['minutes']} minutes; reading takes {minutes:.0f}")
    if minutes > MOST_MINUTES:
        found.append(
            f"reading takes {minutes:.1f} minutes, more than {MOST_MINUTES}: cut it, or split it in two"
        )
    if not LINK.search(head["next"]) or not (LINK.search(head["needs"]) or head["needs"] == "nothing"):
        found.append("what it needs or what comes next is no link")
    wanted = [name for name in SECTIONS if number != ALL_TORCH or name != "By hand"]
    titles = [name for title in sections_of(prose) for name in (*wanted, BOX) if title.startswith(name)]
    if [name for name in titles if name != BOX] != wanted:
        found.append(f"sections {titles}, not {wanted}")
    elif number != ALL_TORCH and not titles.index("By hand") < (titles + [BOX]).index(BOX) < titles.index(
        "Your turn"
    ):
        found.append(f"{BOX} is not between 'By hand' and 'Your turn': {titles}")
    if f"({head['next'].partition('(')[2].rstrip(')')})" not in cells_with_text(cells)[-1]:
        found.append("the last text does not lead on to the next lesson")
    for target in LINK.findall(prose):
        if "://" not in target and not (folder / target.partition("#")[0]).exists():
            found.append(f"a link to {target}, which does not exist")
    named = re.findall(r"\blessons? (\d+)\b(?:(?:, | and | or | to )(\d\d)\b)?", prose, re.IGNORECASE)
    for name in {n for pair in named for n in pair if n}:
        if name.zfill(2) not in NUMBERS:
            found.append(f"lesson {name} is named, which does not exist")
    for command, names, known in (
        ("minipar exercise start", re.findall(r"minipar exercise start ([\w-]+)", prose), exercise_names()),
        ("minipar museum", re.findall(r"`minipar museum\s+(\w[\w-]*)`", prose), set(EXHIBITS)),
    ):
        found += [f"{command} {name}: there is no such thing" for name in names if name not in known]
    if "minipar exercise start" not in prose and "minipar exercise cards" not in prose:
        found.append("nothing to do: no `minipar exercise start NAME`")
    outputs = outputs_of(cells)
    if any(output.get("name") == "stderr" for output in outputs):
        found.append("stored stderr")
    if any(output["output_type"] == "error" for output in outputs):
        found.append("a stored exception")
    if not outputs:
        found.append("no outputs: it was not run")
    if re.search(r"print\((inspect\.)?getsource", text_of(cells, "code")):
        found.append("source printed without highlighting: use minipar.visualize.source.source")
    return found


def exercise_names() -> set[str]:
    return {exercise.name for exercise in EXERCISES}


def cells_with_text(cells: list[dict]) -> list[str]:
    return [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]


def texts_of(path: Path) -> str:
    """The texts of a page or a notebook, and the sources that a notebook shows."""
    if path.suffix == ".md":
        return path.read_text()
    cells = cells_of(path)
    return "\n\n".join([text_of(cells, "markdown"), *(FENCED.sub("", text) for text in shown_by(cells))])


def dead_ends(text: str, folder: Path) -> list[str]:
    """The links, files of the project and dotted names in a text of this folder that lead nowhere."""
    links = [target.partition("#")[0] for target in LINK.findall(text) if "://" not in target]
    return [
        *(f"link to {target}" for target in links if not (folder / target).exists()),
        *(f"file {name}" for name in FILE.findall(text) if not (FOLDER.parent / name).exists()),
        *(f"name {name}" for name in set(NAME.findall(text)) if locate(name) is None),
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_links_files_and_names_in_texts_exist(path):
    assert dead_ends(texts_of(path), path.parent) == []


def test_dead_ends_are_found():
    text = "[`a`](../minipar/trace.py), `minipar/train/restore.py` and `minipar.trace.Trace(...)`"
    found = ["link to ../minipar/trace.py", "file minipar/train/restore.py", "name minipar.trace.Trace"]
    assert dead_ends(text, FOLDER) == found


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_keeps_to_the_template(path):
    assert faults(path.name[:2], cells_of(path)) == []


def test_lesson_numbers_have_no_gap_and_the_index_is_in_order():
    assert [int(number) for number in NUMBERS] == list(range(len(NUMBERS)))
    index = (FOLDER / "README.md").read_text()
    assert re.findall(r"\]\((\d\d_\w+\.ipynb)\)", index) == [path.name for path in LESSONS]
    for path in LESSONS:
        head = HEAD.match(cells_of(path)[0]["source"])
        assert f"| {head['minutes']} | " in next(line for line in index.splitlines() if path.name in line)


def test_a_lesson_shows_an_image_in_its_first_section():
    late = []
    for path in LESSONS:
        cells = cells_of(path)
        second = [i for i, cell in enumerate(cells) if cell["source"].startswith("## ")][1]
        outputs = [output for cell in cells[:second] for output in cell.get("outputs", ())]
        if not any("image/png" in output.get("data", {}) for output in outputs):
            late.append(path.name)
    assert late == []


def leaves_folders(code: str) -> bool:
    """Return whether code makes a temporary folder that nobody removes."""
    return "mkdtemp" in code


def test_no_notebook_leaves_a_temporary_folder():
    """`tempfile.mkdtemp` leaves its folder behind; a `TemporaryDirectory` that the notebook holds goes with the kernel."""
    left = [path.name for path in FOLDER.rglob("*.ipynb") if leaves_folders(text_of(cells_of(path), "code"))]
    assert left == []
    assert leaves_folders("pictures = Path(tempfile.mkdtemp())")


GOOD = cells_of(LESSONS[0])


@pytest.mark.parametrize(
    ("cell", "old", "new", "words"),
    [
        (0, "# 00 ·", "# 0.", "first cell"),
        (0, "# 00 ·", "# 03 ·", "the title says 03"),
        (0, r"\*\d+ minutes", "*2 minutes", "2 minutes; reading takes"),
        (0, "needs nothing", "needs Python", "no link"),
        (None, "## In the interview", "## Questions", "sections"),
        (None, "## In torch", "## Torch", "In torch is not between"),
        (None, "01_ring_all_reduce.ipynb", "01_ring.ipynb", "01_ring.ipynb, which does not exist"),
        (None, "lesson 2", "lesson 77", "lesson 77 is named"),
        (None, "exercise start shift", "exercise start shove", "shove"),
    ],
)
def test_a_fault_of_form_is_found(cell, old, new, words):
    cells = [dict(c) for c in GOOD]
    for i in range(len(cells)) if cell is None else [cell]:
        cells[i]["source"] = re.sub(old, new, cells[i]["source"], count=1)
    assert any(words in fault for fault in faults("00", cells))


def test_stored_noise_is_found():
    noisy = {"outputs": [{"output_type": "stream", "name": "stderr", "text": "Warning"}]}
    cells = [dict(c) for c in GOOD]
    cells[1] |= noisy
    assert "stored stderr" in faults("00", cells)


def test_a_lesson_of_more_than_forty_minutes_is_found():
    long = {"outputs": [{"output_type": "stream", "name": "stdout", "text": "a line\n" * 600}]}
    cells = [dict(c) for c in GOOD]
    cells[1] |= long
    assert any("cut it, or split it" in fault for fault in faults("00", cells))


def test_pictures_and_shown_sources_are_counted():
    picture = {
        "outputs": [{"output_type": "display_data", "data": {"image/png": "", "text/plain": "<Image>"}}]
    }
    shown = "[`a.py`](../a.py), from line 1:\n\n```python\n" + "x = 1\n" * 24 + "```"
    source = {"outputs": [{"output_type": "display_data", "data": {"text/markdown": [shown]}}]}
    text = {"cell_type": "markdown", "source": "![a ring](ring.gif)"}
    code = {"cell_type": "code", "source": ""}
    assert minutes_to_read([code | picture]) == 1
    assert minutes_to_read([text]) == pytest.approx(1 + 2 / 180)
    assert minutes_to_read([code | source]) == pytest.approx(24 / 12 + 4 / 180)
