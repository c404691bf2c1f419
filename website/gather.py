"""The pages of the site, gathered from the files of the checkout into one folder, with links that hold there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from minipar.schedules import SCHEDULES
from website.answers import pipeline
from website.recorded import recordings

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
FIRST = {"schedule": "1f1b", "p": 4, "m": 8}
# where a folder of the checkout is on the site
PLACES = {"README.md": "index.md", "docs/names.md": "names.md"}
# Opened from a folder, a browser runs neither modules nor workers: this is no module, so it runs.
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
    _write(docs / "cards.md", cards())
    _copied(docs, "lessons/exercises")
    _copy(docs, ROOT / "lessons" / "README.md", "lessons/README.md")
    _write(docs / "exercises.md", exercises())
    for file in (ROOT / "docs").iterdir():
        if file.suffix != ".md":
            _copy(docs, file, f"docs/{file.name}")
    for source, target in PLACES.items():
        _copy(docs, ROOT / source, target)
    reference = _reference(docs)
    return [
        {"Home": "index.md"},
        {"Look": [f"interactive/{name}.md" for name in ("pipeline", "planner", "collectives", "mesh")]},
        {"Lessons": [{"The path": "lessons/README.md"}, *lessons]},
        {"Exercises": ["exercises.md", {"How they are checked": "lessons/exercises/README.md"}]},
        {"Museum": [{"Gallery": "museum.md"}, {"Blind": "blind.md"}]},
        {"Interview book": [{"Cards": "cards.md"}, *book]},
        {"Names": "names.md"},
        {"API": reference},
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
        _write(docs / name, relinked(described(text), file, name))
        if file.parent.name == "lessons":
            names.append(name)
    return names


def described(text: str) -> str:
    """Give the pictures of cells an alternative text: the nearest heading above."""
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
    """Point relative links to where things are on the site; what the site does not have is named, without a link."""
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
        on_site = PLACES.get(inside, inside.replace(".ipynb", ".md"))
        kept = on_site.endswith(".md") or on_site.startswith("docs/")
        if kept and on_site:
            return f"{before}{up}{on_site}{after}"
        return f"{before.lstrip('!')[1:-2]} (`{path.relative_to(ROOT).as_posix()}`)"

    return LINK.sub(replaced, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# Pages made of values ----------------------------------------------------------------------------------------------------


def _interactive(docs: Path) -> None:
    values: dict[str, Callable[[], object]] = {
        "SCHEDULES_JSON": lambda: list(SCHEDULES),
        "FIRST_PICTURE_JSON": lambda: {"request": FIRST, "answer": pipeline(FIRST)},
        "RECORDINGS_JSON": recordings,
    }
    for page in sorted((HERE / "pages").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for mark, value in values.items():
            if mark in text:
                text = text.replace(mark, json.dumps(value()).replace("</", "<\\/"))
        _write(docs / "interactive" / page.name, text + FROM_A_FOLDER)
    shutil.copytree(HERE / "assets", docs / "assets")


def museum() -> str:
    """Every exhibit: what its authors saw, and, folded, the fault and what finds it."""
    from minipar.museum.gallery import EXHIBITS

    parts = [
        "# Museum of real bugs\n\nEach can be run: `minipar museum NAME`. With `--blind` the fault is not told.\n"
    ]
    for exhibit in EXHIBITS.values():
        parts.append(f"## {exhibit.title}\n\n`minipar museum {exhibit.name}`: {_seen(exhibit)}\n")
        parts.append(_folded("What it was", _story(exhibit)))
    return "\n".join(parts)


def blind() -> str:
    """The symptoms alone; the name and the story are folded away."""
    from minipar.museum.gallery import EXHIBITS

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
    """The interview book as cards that fold, by topic."""
    from minipar.quiz.book import book, topics

    parts = ["# Interview cards\n\nSay your answer aloud, then unfold.\n"]
    for topic in topics():
        parts.append(f"## {topic.capitalize()}\n")
        for q in book():
            if q.topic == topic:
                parts.append(
                    _folded(q.question, f"{q.answer}\n\n**Next**: {q.follow_up}\n\n**Trap**: {q.trap}")
                )
    return "\n".join(parts)


def exercises() -> str:
    """The texts of the exercises: what is to be written, as the learner gets it."""
    from minipar.exercises.registry import EXERCISES

    parts = [
        "# Exercises\n\n`minipar exercise start NAME` writes the file; `check NAME` checks it on real ranks.\n"
    ]
    for exercise in EXERCISES:
        stub = ROOT / "minipar" / "exercises" / "stubs" / f"{exercise.name.replace('-', '_')}.py"
        text = stub.read_text(encoding="utf-8") if stub.exists() else ""
        parts.append(f"## {exercise.name}\n\n```python\n{text}```\n")
    return "\n".join(parts)


def _folded(title: str, text: str) -> str:
    inside = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? note "{title.replace(chr(34), chr(39))}"\n{inside}\n'


def _reference(docs: Path) -> list:
    """A page per package, with every module's docstrings."""
    pages = []
    for package in sorted((ROOT / "minipar").iterdir()):
        if not (package / "__init__.py").exists():
            continue
        modules = [f"minipar.{package.name}"] + [
            f"minipar.{package.name}.{file.stem}"
            for file in sorted(package.glob("*.py"))
            if file.stem[0] != "_"
        ]
        _write(
            docs / "api" / f"{package.name}.md",
            f"# minipar.{package.name}\n\n" + "".join(f"::: {m}\n\n" for m in modules),
        )
        pages.append({package.name: f"api/{package.name}.md"})
    return pages
