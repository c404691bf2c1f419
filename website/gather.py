"""The pages of the site, gathered from the files of the checkout into one folder, with links that hold there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html import escape
from pathlib import Path

from minipar.schedules.registry import DRAWN, SCHEDULES
from website.answers import choices, curves, mesh, pipeline, planned
from website.explorables import HOME, explorable, explorable_box
from website.puzzles import buttons, sections, stubs
from website.recorded import recordings

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
FIRST = {"schedule": "1f1b", "p": 4, "m": 8}
FIRST_MESH = {"pp": 2, "dp": 2, "tp": 4, "ranks_per_node": 8, "rank": 5}
# file of the checkout -> its place on the site
PLACES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "minipar/simple/README.md": "floor.md",
    **{file.relative_to(ROOT).as_posix(): file.name for file in (ROOT / "docs").rglob("*.md")},
}
PAGES = (".md", ".ipynb")
# On pages opened from a folder, a browser runs neither modules nor workers. This script is not a module, so it runs.
FROM_A_FOLDER = """
<script>
if (location.protocol === "file:") document.querySelector("#status").textContent =
  "From a folder, a browser lets no page start Python: run minipar explore, or serve this folder.";
</script>
"""
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def gather(docs: Path) -> list:
    """Write all pages to `docs`; return the navigation."""
    _interactive(docs)
    lessons = _lessons(docs)
    book = _copied(docs, "lessons/interview")
    _write(docs / "museum.md", museum())
    _write(docs / "blind.md", blind())
    _copied(docs, "lessons/exercises")
    _copy(docs, ROOT / "lessons" / "problems.md", "lessons/problems.md")
    _copy(docs, ROOT / "lessons" / "README.md", "lessons/README.md")
    _write(docs / "exercises.md", exercises())
    for file in (ROOT / "docs").rglob("*.*"):
        if file.suffix != ".md":
            _copy(docs, file, file.relative_to(ROOT).as_posix())
    for source, target in PLACES.items():
        _copy(docs, ROOT / source, target)
    reference = _reference(docs)
    return [
        {"Home": "index.md"},
        {
            "Use": [
                {"In short": "readme.md"},
                {"All commands": "use.md"},
                {"A model of your own": "your_own_model.md"},
                {"Machines": "machines.md"},
                {"Before a large run": "checklist.md"},
                {"The planner's errors": "planner.md"},
                {"What it would choose": "planner_choices.md"},
            ]
        },
        {
            "Learn": [
                "learn.md",
                {"The ground floor": "floor.md"},
                {"The strategy map": "strategies.md"},
                {"Workload, bottleneck, action": "workloads.md"},
                {"A run, tuned": "tuning.md"},
                {"A router's options": "routing.md"},
                {"Claims, computed": "claims.md"},
                {"Foreign code, judged": "foreign_code.md"},
            ]
        },
        {
            "Play": [
                f"interactive/{name}.md" for name in ("puzzles", "pipeline", "planner", "collectives", "mesh")
            ]
        },
        {"Lessons": [{"The path": "lessons/README.md"}, *lessons]},
        {
            "Exercises": [
                "exercises.md",
                {"How they are checked": "lessons/exercises/README.md"},
                "lessons/problems.md",
            ]
        },
        {"Museum": [{"Gallery": "museum.md"}, {"Blind": "blind.md"}]},
        {"Interview book": [{"Cards": "cards.md"}, *book]},
        {"Names": "names.md"},
        {
            "Extend": [
                {"Design": "design.md"},
                "contributing.md",
                *(f"{path.stem}.md" for path in sorted((ROOT / "docs" / "guide").iterdir())),
                {"Extras": "extras.md"},
                "changelog.md",
            ]
        },
        {"API": [{"Public names": "api.md"}, *reference]},
    ]


# Texts of the checkout -------------------------------------------------------------------------------------------------


def _copied(docs: Path, folder: str) -> list[str]:
    names = []
    for file in sorted((ROOT / folder).glob("*.md"), key=lambda file: (file.name != "README.md", file.name)):
        names.append(f"{folder}/{file.name}")
        _copy(docs, file, names[-1])
    return names


def _lessons(docs: Path) -> list[str]:
    from nbconvert import MarkdownExporter

    names = []
    for file in sorted((ROOT / "lessons").rglob("*.ipynb")):
        if ".ipynb_checkpoints" in file.parts:
            continue
        text, resources = MarkdownExporter().from_filename(str(file))
        name = file.relative_to(ROOT).with_suffix(".md").as_posix()
        folder = docs / Path(name).parent / f"{file.stem}_files"
        for picture, data in resources["outputs"].items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / picture).write_bytes(data)
            text = text.replace(f"({picture})", f"({file.stem}_files/{picture})")
        text = relinked(described(text), file, name)
        if file.parent.name == "lessons":
            names.append(name)
            text = explorable(file.name[:2], text)
        _write(docs / name, text)
    return names


def described(text: str) -> str:
    """Give pictures in cells an alternative text, the nearest heading above them."""
    heading, lines = "", []
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip()
        lines.append(
            re.sub(r"!\[(png|svg|)\]\(", f"![Picture: {re.escape(heading)}](".replace("\\", ""), line)
        )
    return "\n".join(lines) + "\n"


def _copy(docs: Path, file: Path, name: str) -> None:
    target = docs / name
    if file.suffix == ".md":
        _write(target, relinked(file.read_text(encoding="utf-8"), file, name))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def relinked(text: str, file: Path, name: str) -> str:
    """Point relative links to their targets on the site; a target that the site does not have is named without a link."""
    up = "../" * name.count("/")

    def replaced(found: re.Match) -> str:
        before, target, after = found.groups()
        if "://" in target or target.startswith(("mailto:", "data:")) or f"{file.stem}_files/" in target:
            return found[0]
        path = (file.parent / target).resolve()
        if not path.exists() or ROOT not in path.parents:
            return found[0]
        inside = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            inside = f"{inside}/README.md" if (path / "README.md").exists() else ""
        page = PLACES.get(inside)
        if page is None and (
            inside.startswith("docs/") or inside.startswith("lessons/") and inside.endswith(PAGES)
        ):
            page = inside.replace(".ipynb", ".md")
        if page is not None:
            return f"{before}{up}{page}{after}"
        return f"{before.lstrip('!')[1:-2]} (`{path.relative_to(ROOT).as_posix()}`)"

    return LINK.sub(replaced, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# Pages made of values ----------------------------------------------------------------------------------------------------


def _interactive(docs: Path) -> None:
    values: dict[str, Callable[[], object]] = {
        "SCHEDULES_JSON": lambda: [*SCHEDULES, *(name for name in DRAWN if name != "optimal")],
        "FIRST_PICTURE_JSON": lambda: {"request": FIRST, "answer": pipeline(FIRST)},
        "RECORDINGS_JSON": recordings,
        "CHOICES_JSON": lambda: choices({}),
        "FIRST_PLAN_JSON": lambda: planned({}),
        "FIRST_MESH_JSON": lambda: mesh(FIRST_MESH),
        "FIRST_CURVES_JSON": lambda: curves({"p": 6, "alpha_us": 10, "gb_per_s": 25}),
        "PUZZLES_JSON": stubs,
    }
    for page in sorted((HERE / "pages").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for mark, value in values.items():
            if mark in text:
                text = text.replace(mark, json.dumps(value(), separators=(",", ":")).replace("</", "<\\/"))
        text = text.replace("PUZZLES_MARKDOWN", sections()).replace("PUZZLES_LIST", buttons())
        if page.stem == "home":
            text = text.replace("PIPELINE_BOX", explorable_box(HOME))
            _write(docs / "index.md", _with_numbers(text) + FROM_A_FOLDER)
        elif page.stem == "cards":  # from a folder it is a list to unfold, and needs no line about Python
            _write(
                docs / "cards.md",
                text.replace("CHAPTER_OPTIONS", _chapters()).replace("CARDS_MARKDOWN", cards()),
            )
        else:
            _write(docs / "interactive" / page.name, text + FROM_A_FOLDER)
    shutil.copytree(HERE / "assets", docs / "assets")


def _with_numbers(home: str) -> str:
    """Fill in how many lessons, exercises, questions and exhibits there are."""
    from minipar.learn.exercises.registry import EXERCISES
    from minipar.learn.museum.gallery import EXHIBITS
    from minipar.learn.puzzles.registry import PUZZLES
    from minipar.learn.quiz.book import book

    values = {
        "NUM_LESSONS": len(list((ROOT / "lessons").glob("*.ipynb"))),
        "NUM_EXERCISES": len(EXERCISES),
        "NUM_QUESTIONS": len(book()),
        "NUM_PUZZLES": len(PUZZLES),
        "NUM_EXHIBITS": len(EXHIBITS),
    }
    for mark, value in values.items():
        home = home.replace(mark, str(value))
    return home


def museum() -> str:
    """Return the page of all exhibits: what the authors saw and, folded, the fault and what finds it."""
    from minipar.learn.museum.gallery import EXHIBITS

    parts = [
        "# Museum of real bugs\n\nEach can be run: `minipar museum NAME`. With `--blind` the fault is not told.\n"
    ]
    for exhibit in EXHIBITS.values():
        parts.append(f"## {exhibit.title}\n\n`minipar museum {exhibit.name}`: {_seen(exhibit)}\n")
        parts.append(_folded("What it was", _story(exhibit)))
    return "\n".join(parts)


def blind() -> str:
    """Return the page of symptoms only; names and stories are folded away."""
    from minipar.learn.museum.gallery import EXHIBITS

    parts = [
        "# Blind\n\nOnly what was seen. What would you look for? `minipar museum --blind` runs one of these.\n"
    ]
    for number, exhibit in enumerate(EXHIBITS.values(), 1):
        parts.append(f"## Case {number}\n\n{_seen(exhibit)}\n")
        parts.append(_folded("Answer", f"**{exhibit.title}** (`{exhibit.name}`)\n\n{_story(exhibit)}"))
    return "\n".join(parts)


def _seen(exhibit) -> str:
    return f"*Symptom: {exhibit.symptom}.* {exhibit.missed}"


def _story(exhibit) -> str:
    parts = {"What says so": exhibit.says, "The rule": exhibit.rule, "Seen in": exhibit.real}
    return "\n\n".join([exhibit.story, *(f"**{name}**: {text}" for name, text in parts.items())])


def cards() -> str:
    """Return the interview book by chapter: a question to unfold and, inside its answer, the follow-up to unfold."""
    from benchmarks.guide.interview import LEVELS, cells_of, proof_link
    from minipar.learn.quiz.book import book, topics

    cells, parts = cells_of(ROOT / "lessons"), []
    for topic in topics():
        parts.append(
            f'<section class="chapter" data-chapter="{topic}" markdown>\n\n## {topic.capitalize()}\n'
        )
        for q in book():
            if q.topic == topic:
                parts += [
                    f'<details class="card" id="{q.id}" data-chapter="{topic}" '
                    f'data-level="{topic.capitalize()}: {LEVELS[q.level]}" markdown>',
                    f"<summary>{escape(q.question)}</summary>\n",
                    f"{q.answer}\n\n**Trap**: {q.trap}\n\n**Shown by**: {proof_link(q.proof, cells)}\n",
                    f"<details markdown>\n<summary>Next: {escape(q.follow_up)}</summary>\n",
                    f"{q.follow_up_answer}\n\n</details>\n</details>\n",
                ]
        parts.append("</section>\n")
    return relinked("\n".join(parts), ROOT / "lessons" / "interview" / "README.md", "cards.md")


def _chapters() -> str:
    """Return the options of the cards' menu: a chapter each, with its number of questions."""
    from minipar.learn.quiz.book import book, topics

    of = {topic: sum(q.topic == topic for q in book()) for topic in topics()}
    return f'<option value="">all ({len(book())})</option>' + "".join(
        f'<option value="{topic}">{topic} ({count})</option>' for topic, count in of.items()
    )


def exercises() -> str:
    """Return the page of exercises, with the stub of each as the learner gets it."""
    from minipar.learn.exercises.folder import STUBS
    from minipar.learn.exercises.registry import EXERCISES

    parts = [
        "# Exercises\n\n`minipar exercise start NAME` writes the file; `check NAME` checks it on real ranks. For first "
        "steps with nothing to install, there are [the puzzles](interactive/puzzles.md).\n"
    ]
    for exercise in EXERCISES:
        text = (STUBS / f"{exercise.name}.py").read_text(encoding="utf-8")
        after = f", after {' and '.join(f'`{name}`' for name in exercise.needs)}" * bool(exercise.needs)
        said = f"`{exercise.name}`: about {exercise.minutes} minutes; lesson {exercise.lesson}{after}."
        parts.append(f"## {exercise.title} {{ #{exercise.name} }}\n\n{said}\n\n```python\n{text}```\n")
    return "\n".join(parts)


def _folded(title: str, text: str) -> str:
    inside = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? note "{title.replace(chr(34), chr(39))}"\n{inside}\n'


def _reference(docs: Path) -> list:
    """Write a page per package, with every module's docstrings; return their navigation."""
    pages = []
    for package in sorted((ROOT / "minipar").iterdir()):
        if not (package / "__init__.py").exists():
            continue
        modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in _modules_of(package)]
        _write(
            docs / "api" / f"{package.name}.md",
            f"# minipar.{package.name}\n\n" + "".join(f"::: {m}\n\n" for m in modules),
        )
        pages.append({package.name: f"api/{package.name}.md"})
    return pages


def _modules_of(package: Path) -> list[Path]:
    """Return the package's files: its `__init__`, its modules, and then the files of each subpackage."""
    modules = [file for file in sorted(package.glob("*.py")) if file.stem[0] != "_"]
    inside = [folder for folder in sorted(package.iterdir()) if (folder / "__init__.py").exists()]
    return [package, *modules, *(module for folder in inside for module in _modules_of(folder))]
