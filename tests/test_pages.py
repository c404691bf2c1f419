"""README and the pages of docs: their commands parse and are legal, their code runs, their links lead somewhere."""

import io
import json
import re
import shlex
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from minipar.cli import _parse
from minipar.cli.flags import config_of
from minipar.config.toml_config import as_toml
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.learn.ideas import with_table
from minipar.train.verification.legal_configs import configs_to_verify
from tests.page_programs import FENCE, printed

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "lessons/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
COMMANDS = sorted(
    {
        line.partition("  #")[0].strip()
        for name in (
            "README.md",
            "docs/use.md",
            "docs/learn.md",
            "docs/generated/tuning.md",
            "docs/checklist.md",
        )
        for _, language, block in FENCE.findall(TEXTS[name])
        for line in block.splitlines()
        if language in ("", "sh") and line.strip().startswith("minipar ")
    }
)
LLAMA = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
NEEDS_A_RUN = "runs/dp4"  # which the first command leaves
QUICK = (
    "minipar timeline --schedule 1f1b zb-h1 --no-draw",
    "minipar plan --model llama-70b --gpus 64 --machine h100",
    "minipar exercise list",
    "minipar museum",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the configuration that a run leaves, and that of a Llama."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / NEEDS_A_RUN).mkdir(parents=True)
    (tmp_path / NEEDS_A_RUN / "config.toml").write_text(as_toml(TrainConfig(dp=4)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_pages_have_commands():
    assert len(COMMANDS) >= 25
    assert {line.split()[1] for line in COMMANDS} >= {
        *(
            "train",
            "verify",
            "plan",
            "timeline",
            "tokenize",
            "generate",
            "export",
            "bench",
            "explore",
            "calibrate",
        ),
        *("exercise", "museum", "quiz"),
    }


# Commands inside sentences; one that ends in a flag, or has a placeholder, only names them.
INLINE = {
    " ".join(line.split())
    for name, text in TEXTS.items()
    if name != "CHANGELOG.md"
    for line in re.findall(r"`(minipar (?:train|verify) --[^`]+)`", text)
}
LEGAL = sorted(
    line
    for line in INLINE
    if not re.search(r" [A-Z]+\b|--help", line) and not line.split()[-1].startswith("--")
)


def test_the_pages_have_commands_in_sentences():
    assert any("nvfp4" in line for line in LEGAL)
    assert len(LEGAL) >= 4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("line", LEGAL)
def test_the_run_of_a_command_in_a_sentence_is_legal(line, folder):
    config_of(_parse(shlex.split(line)[1:]).args[0], TrainConfig)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood_and_its_run_is_legal(line, folder):
    command = _parse(shlex.split(line)[1:])
    assert callable(command)
    if line.split()[1] in ("train", "verify") and not isinstance(
        command.args[0], str
    ):  # else a training of one's own
        config_of(command.args[0], TrainConfig)


def test_a_wrong_command_would_be_found(folder):
    with pytest.raises(ValueError, match="did you mean --microbatches"):
        _parse(shlex.split("train --pp 2 --microbatch 4"))
    with pytest.raises(ValueError, match="tp=3"):
        config_of(_parse(["train", "--tp", "3"]).args[0], TrainConfig)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line in QUICK or f"{line} --no-draw" in QUICK])
def test_a_quick_command_does_what_it_says(line, folder):
    words = next(quick for quick in QUICK if quick in (line, f"{line} --no-draw"))
    out = io.StringIO()
    with redirect_stdout(out):
        _parse(shlex.split(words)[1:])()
    assert len(out.getvalue().splitlines()) > 5


def blocks(name: str) -> list[str]:
    return [block for _, language, block in FENCE.findall(TEXTS[name]) if language == "python"]


def test_the_ten_lines_of_readme_run():
    """Every rank sends as much as a ring does: 2(p-1)/p of the gradients, padded at most."""
    (source,) = blocks("README.md")
    assert len([line for line in source.splitlines() if line.strip()]) <= 12
    sent = eval(printed(source))
    assert len(sent) == 4
    assert len(set(sent)) == 1
    assert sent[0] > 0


@pytest.mark.parametrize("source", blocks("docs/learn.md"), ids=["all_reduce", "reduce_scatter"])
def test_what_is_judged_on_the_page_gets_the_words_on_the_page(source):
    (words,) = re.findall(r"^# (?:\.\.\. )?(.+)$", source, re.M)
    assert words in printed(source)


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name):
    """To a file of the checkout, and to a heading of it."""
    text = re.sub(r"^ *(`{3,4})\w*\n.*?^ *\1$", "", TEXTS[name], flags=re.M | re.S)
    text = re.sub(r"after the line (`+).+?\1", "", text)  # a line of another file
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert heading in slugs, target


def test_readme_is_one_screen_and_leads_to_every_page():
    """One screen, beside the table of ideas."""
    text = TEXTS["README.md"]
    assert len(with_table(text, "").splitlines()) <= 70
    pages = {f"docs/{name}.md" for name in ("use", "your_own_model", "learn", "design", "extras")} | {
        "CONTRIBUTING.md"
    }
    assert {page for page in pages if f"({page})" not in text} == set()
    assert len(re.findall(r"^!\[.+\]\(docs/generated/\w+\.png\)$", text, re.M)) == 1


def test_the_speed_that_readme_tells_is_in_the_table():
    table = TEXTS["docs/use.md"].split("## How fast")[1]
    told = TEXTS["README.md"].split("## Speed")[1]
    ratios = re.findall(r"(DDP|ZeRO-1|FSDP|tensor parallelism|1F1B) (\d\.\d\d to \d\.\d\d)", told)
    assert len(ratios) == 5
    for name, ratio in ratios:
        row = next(line for line in table.splitlines() if line.startswith(f"| {name}"))
        assert row.split("|")[4].strip() == ratio, row


def test_readme_counts_exactly_the_meshes_the_sweep_verifies():
    (number,) = re.findall(r"--world-size 8` compares each of the (\d+) legal", TEXTS["README.md"])
    assert int(number) == len(configs_to_verify(VERIFY_DEFAULTS, 8))


def launched(text: str) -> list[list[str]]:
    """Return the words of every torchrun command in a text of one of the languages of docs/machines.md."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line[line.index("torchrun ") :]) for line in lines if "torchrun --" in line]


def test_every_way_to_start_ranks_starts_as_many_as_the_mesh_needs():
    """Under torchrun, SLURM and Kubernetes: nodes x ranks of a node; the command after `-m minipar` is legal."""
    found = {language: block for _, language, block in FENCE.findall(TEXTS["docs/machines.md"])}
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(found["yaml"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (slurm_nodes,) = re.findall(r"--nodes=(\d+)", found["bash"])
    (plain,), (slurm,), pod = launched(found[""]), launched(found["bash"]), container["command"]
    pod = [part for word in pod for part in word.split("=", 1)]
    starts = [(plain, None), (slurm, slurm_nodes), (pod, str(job["spec"]["completions"]))]
    for words, nodes in starts:
        nodes = nodes or words[words.index("--nnodes") + 1]
        ranks = int(words[words.index("--nproc-per-node") + 1]) * int(nodes)
        config, expected = (
            config_of(_parse(each[each.index("minipar") + 1 :]).args[0], TrainConfig)
            for each in (words, plain)
        )
        assert config.world_size == ranks
        assert config == expected
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == 8
    host = pod[pod.index("--rdzv-endpoint") + 1]
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert host == f"{name}-0.{service['metadata']['name']}:29500"
    assert subdomain == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}


def test_the_ray_example_is_python_of_this_package():
    """Ray is not installed here: the code is compiled, and each name that it imports from minipar exists."""
    import importlib

    (source,) = blocks("docs/machines.md")
    compile(source, "<page>", "exec")
    imported = re.findall(r"^from (minipar[\w.]*) import (.+)$", source, re.M)
    assert imported
    for module, names in imported:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), name


@pytest.mark.parametrize("line", re.findall(r"`make ([\w-]+)", "".join(TEXTS.values())))
def test_a_target_that_a_page_names_is_in_the_makefile(line):
    assert re.search(rf"^{line}:", (ROOT / "Makefile").read_text(), re.M)


# Papers of the project ------------------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def minors(text: str) -> list[int]:
    return [int(minor) for minor in re.findall(r'"3\.(\d+)"', text)]


def test_the_workflow_tests_every_python_from_pyprojects_oldest():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    (oldest,) = re.findall(r"^>=3\.(\d+)$", PROJECT["requires-python"])
    tested = minors(re.search(r"python: \[(.+)\]", workflow)[1])
    assert tested == list(range(int(oldest), 15))
    assert "- run: make test\n" in workflow
    assert "- run: make newest\n" in workflow


def test_the_workflow_of_the_site_deploys_what_make_site_builds():
    workflow = (ROOT / ".github" / "workflows" / "site.yml").read_text()
    order = [workflow.index(step) for step in ("run: make site", "path: build/site", "actions/deploy-pages@")]
    assert order == sorted(order)
    (python,) = minors(workflow)
    assert python >= int(PROJECT["requires-python"].partition(".")[2])


@pytest.mark.parametrize("name", ["test", "site"])
def test_a_workflow_is_yaml_with_jobs_that_have_steps(name):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert workflow["name"] == name
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])


def test_the_citation_is_of_this_version_and_licence():
    text = (ROOT / "CITATION.cff").read_text()
    told = dict(re.findall(r"^([\w-]+): *(\S.*)$", text, re.M))
    assert told["version"] == PROJECT["version"]
    assert told["cff-version"] == "1.2.0"
    assert told["license"] == (ROOT / "LICENSE").read_text().split()[0]
    assert {"title", "message", "authors"} <= set(re.findall(r"^([\w-]+):", text, re.M))


def test_the_changelog_keeps_its_form():
    text = TEXTS["CHANGELOG.md"]
    assert re.findall(r"^## (.+)$", text, re.M)[0] == "[Unreleased]"
    kinds = set(re.findall(r"^### (.+)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert PROJECT["version"] in text


def test_the_site_has_every_page_in_its_navigation():
    navigation = (ROOT / "website" / "gather.py").read_text().split("return [", 1)[1]
    pages = {Path(name).name for name in TEXTS if name.startswith("docs/") and "/guide/" not in name}
    assert {page for page in pages if f'"{page}"' not in navigation} <= {
        "gpu.md"
    }  # written where there are GPUs
