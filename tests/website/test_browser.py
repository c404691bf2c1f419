"""The built site in a real browser: no error, no foreign request, the library's numbers, usable by keyboard and on a phone.

Skipped where the site is not built or Chromium is not installed; `make site-test` does both where it can.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from html import unescape
from urllib.parse import unquote, urlencode, urljoin, urlsplit

import pytest

from minipar.cost.plan_command import plan_command
from minipar.learn.puzzles.registry import PUZZLES
from minipar.learn.puzzles.verdicts import check
from minipar.schedules import SCHEDULES, make_schedule, simulate
from minipar.schedules.registry import find_schedule
from tests.schedules.families import TWO_WAYS
from tests.website.serving import served
from website import lesson_pictures as pictures
from website.build import AXE, SITE, from_npm
from website.explorables import EXPLORABLES

INTERACTIVE = [
    f"interactive/{name}.html" for name in ("puzzles", "pipeline", "planner", "collectives", "mesh")
]
PYTHON_AT_ONCE = [page for page in INTERACTIVE if "collectives" not in page]
LONG_S = 90  # a deadline, on a busy machine; on an idle one Python starts in a few seconds


COLOURS_HAVE_FADED = "document.getAnimations().every(found => found.playState !== 'running')"


def until(browser, script: str, *args):
    """Wait until the script returns something true, and return it."""
    begin = time.monotonic()
    while not (value := browser.execute_script(f"return {script}", *args)):
        if time.monotonic() - begin > LONG_S:
            status = browser.execute_script("return document.querySelector('#status')?.textContent")
            raise AssertionError(f"{script} stayed false; the page says {status!r}")
        time.sleep(0.05)
    return value


def loaded(browser, site_url: str, page: str, **settings):
    """Open a page; its recorded pictures are there then, and Python perhaps not yet."""
    browser.get("about:blank")
    browser.get(f"{site_url}/{page}" + (f"#{urlencode(settings)}" if settings else ""))
    return browser


def opened(browser, site_url: str, page: str, **settings):
    """Open a page, and wait until Python is there, where the page starts it."""
    loaded(browser, site_url, page, **settings)
    if page in PYTHON_AT_ONCE:
        until(browser, "document.body.dataset.python === 'ready'")
    return browser


def status(browser) -> str:
    return browser.execute_script("return document.querySelector('#status').textContent")


def set_field(browser, form: str, name: str, value) -> int:
    """Set a field; return how many parts of the picture move then. They do so for less than a second."""
    return browser.execute_script(
        "const field = document.querySelector(arguments[0]).elements[arguments[1]]; field.value = arguments[2];"
        "for (const name of ['input', 'change']) field.dispatchEvent(new Event(name, {bubbles: true}));"
        "return document.querySelectorAll('#picture .moving').length",
        form, name, str(value),
    )  # fmt: skip


def drawn(browser) -> str:
    return browser.execute_script("return document.body.dataset.drawn ?? ''")


def bubble_after(browser, act) -> float:
    """Do something to the pipeline's page; return the bubble it then shows, at full precision."""
    before = drawn(browser)
    act()
    until(browser, f"document.body.dataset.drawn !== {json.dumps(before)}")
    until(browser, "document.querySelector('#status').textContent !== 'computing ...'")
    return float(browser.execute_script("return document.querySelector('#first output').dataset.bubble"))


def html_pages() -> list[str]:
    return sorted(page.relative_to(SITE).as_posix() for page in SITE.rglob("*.html")) if SITE.exists() else []


def test_every_page_opens_without_an_error_or_a_foreign_request(browser, site_url):
    browser.get_log("browser")
    browser.get_log("performance")
    pages = html_pages()
    assert len(pages) > 40
    for page in pages:
        opened(browser, site_url, page)
        assert [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"] == [], (
            page
        )
    sent = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if url.startswith(("http", "ws")) and not url.startswith(site_url)} == set()


def test_all_links_resolve():
    if not html_pages():
        pytest.skip("the site is not built: make site")
    missing = set()
    for page in html_pages():
        text = (SITE / page).read_text(encoding="utf-8")
        for link in re.findall(r'(?:href|src)="([^"#]+)', text):
            url = urlsplit(urljoin(f"http://here/{page}", link.replace("&amp;", "&")))
            if url.netloc == "here" and not (SITE / unquote(url.path).lstrip("/")).exists():
                missing.add((page, link))
    missing = {(page, link) for page, link in missing if page != "404.html"}
    assert missing == set()


def test_the_bubble_on_the_page_is_the_simulators(browser, site_url):
    opened(browser, site_url, "interactive/pipeline.html")
    until(browser, "document.querySelector('#status').textContent === ''")
    # Two directions at the end: p and m stay even then.
    for name in (*SCHEDULES.usable(), *TWO_WAYS):
        for p, m in ((2, 2), (4, 6)) if name in TWO_WAYS else ((1, 1), (2, 5), (4, 8)):
            for field, value in (("p", p), ("m", m)):
                bubble_after(
                    browser, lambda field=field, value=value: set_field(browser, "#settings", field, value)
                )
            shown = bubble_after(browser, lambda name=name: set_field(browser, "#settings", "schedule", name))
            want = simulate(
                make_schedule(name, p, m, **({"slices": 2} if find_schedule(name).sliced else {}))
            )
            assert shown == pytest.approx(want.bubble_over_total, abs=1e-12), name


def shown_bubble(browser) -> float:
    return browser.execute_script(
        "return Number(document.querySelector('#status [data-bubble]').dataset.bubble)"
    )


def python_was_loaded(browser) -> bool:
    loaded = browser.execute_script("return performance.getEntries().map((e) => e.name)")
    return any("pyodide" in url or url.endswith("/worker.js") for url in loaded)


def save_data(browser) -> None:
    """Let the browser ask for little data: the page then starts no Python."""
    browser.execute_script("Object.defineProperty(navigator, 'connection', {value: {saveData: true}})")


def test_the_home_page_shows_simulator_numbers_without_python(browser, site_url):
    opened(browser, site_url, "index.html")
    assert until(browser, "document.body.dataset.drawn") == "1f1b 4 8"
    save_data(browser)
    for i, name in enumerate(pictures.SCHEDULES):
        set_field(browser, "#settings", "schedule", i)
        for place in (0, 3):
            for field in ("p", "m"):
                set_field(browser, "#settings", field, place)
            p, m = pictures.RANKS[place], pictures.MICROBATCHES[place]
            want = simulate(make_schedule(name, p, m))
            assert shown_bubble(browser) == pytest.approx(want.bubble_over_total, abs=1e-12)
            assert len(browser.find_elements("css selector", "#first [data-row]")) == p
            actions = sum(map(len, want.schedule.actions))
            assert len(browser.find_elements("css selector", "#first .action")) == actions
    assert "python" not in browser.execute_script("return document.body.dataset")
    assert not python_was_loaded(browser)


def test_once_touched_the_home_page_is_pythons_own(browser, site_url):
    opened(browser, site_url, "index.html")
    until(browser, "document.body.dataset.drawn")
    assert not python_was_loaded(browser)
    set_field(browser, "#settings", "m", 4)
    until(browser, "document.body.dataset.drawn === '1f1b 4 16 live'")
    for field, value in (("p", 5), ("m", 7), ("schedule", 2)):  # sizes that were not recorded
        set_field(browser, "#settings", field, value)
    until(browser, "document.body.dataset.drawn === 'zb-h1 5 7 live'")
    want = simulate(make_schedule("zb-h1", 5, 7))
    assert shown_bubble(browser) == pytest.approx(want.bubble_over_total, abs=1e-12)
    link = browser.execute_script("return document.querySelector('#more').href")
    assert link.endswith("interactive/pipeline.html#schedule=zb-h1&p=5&m=7")


def lesson_page(number: str) -> str:
    return next(page for page in html_pages() if page.startswith(f"lessons/{number}_"))


@pytest.mark.parametrize("number", EXPLORABLES)
def test_a_lessons_explorable_works_at_once_without_python(browser, site_url, number):
    if not html_pages():
        pytest.skip("the site is not built: make site")
    opened(browser, site_url, lesson_page(number))
    seen = [until(browser, "document.body.dataset.drawn")]
    save_data(browser)
    shown = "return document.querySelector('#first').innerHTML + document.querySelector('#status').innerHTML"
    before = browser.execute_script(shown)
    recorded = json.loads(browser.execute_script("return document.querySelector('#recorded').textContent"))
    for field in recorded["fields"]:
        other = 0 if field["at"] else 1
        set_field(browser, "#settings", field["name"], other)
        until(browser, f"document.body.dataset.drawn !== {json.dumps(seen[-1])}")
        seen.append(drawn(browser))
        assert browser.execute_script(shown) != before
        before = browser.execute_script(shown)
    assert not python_was_loaded(browser)
    assert browser.find_element("css selector", "#more").get_attribute("href").startswith(site_url)


@pytest.mark.parametrize("number", ["02", "03", "06", "07", "09", "10", "12", "17"])
def test_what_a_lesson_has_recorded_is_the_librarys(number):
    if not html_pages():
        pytest.skip("the site is not built: make site")
    text = (SITE / lesson_page(number)).read_text(encoding="utf-8")
    recorded = json.loads(re.search(r'id="recorded">(.*?)</script>', text)[1])
    want = EXPLORABLES[number].recording()
    assert recorded["answers"] == json.loads(json.dumps(want.answers))


def test_zeros_bars_say_what_the_planner_says(browser, site_url):
    if not html_pages():
        pytest.skip("the site is not built: make site")
    opened(browser, site_url, lesson_page("03"))
    until(browser, "document.body.dataset.drawn === '8 llama-7b'")
    said = browser.execute_script(
        "return [...document.querySelectorAll('.bar-row b')].map((b) => b.textContent)"
    )
    held = [sum(memory.values()) for memory in pictures.zero_stages(8, "llama-7b")["stages"]]
    assert said == [f"{num_bytes / 1e9:.1f} GB" for num_bytes in held]


def test_first_pictures_are_in_the_pages_text():
    """So that they are there without JavaScript, too."""
    if not html_pages():
        pytest.skip("the site is not built: make site")
    drawn_into = {"index.html": ["first", "status"], "interactive/pipeline.html": ["first"]}
    drawn_into |= {"interactive/mesh.html": ["ranks", "rank"], "interactive/planner.html": ["best", "layout"]}
    drawn_into["interactive/collectives.html"] = ["picture", "status", "curves"]
    drawn_into |= {lesson_page(number): ["first", "status"] for number in EXPLORABLES}
    for page, names in drawn_into.items():
        text = (SITE / page).read_text(encoding="utf-8")
        for name in names:
            opening, content = re.search(rf'<(?:div|p)([^>]* id="{name}"[^>]*)>\s*(.{{40}})', text).groups()
            assert not content.startswith("</"), (page, name, opening)


def test_lessons_have_minutes_prerequisites_previous_and_next():
    pages = [page for page in html_pages() if re.match(r"lessons/\d\d_", page)]
    if not pages:
        pytest.skip("the site is not built: make site")
    for page in pages:
        text = (SITE / page).read_text(encoding="utf-8")
        assert re.search(r"<em>\d+ minutes · needs .*? · next ", text), page
        assert "md-footer__link--prev" in text
        assert "md-footer__link--next" in text


def test_your_turn_leads_to_the_exercise_and_the_puzzle():
    if not html_pages():
        pytest.skip("the site is not built: make site")
    exercises = (SITE / "exercises.html").read_text(encoding="utf-8")
    for number, name, puzzle in (("06", "one_f_one_b", "1f1b"), ("01", "all_reduce_in_place", "ring")):
        (lesson,) = (SITE / "lessons").glob(f"{number}_*.html")
        turn = lesson.read_text(encoding="utf-8").partition('<h2 id="your-turn">')[2].partition("<h2")[0]
        assert f'href="../interactive/puzzles.html#puzzle={puzzle}"' in turn
        first = re.search(r'href="../exercises.html#(\w+)"', turn)[1]
        assert f'id="{first}"' in exercises
        assert name in turn


def test_the_home_page_is_light():
    if not html_pages():
        pytest.skip("the site is not built: make site")
    assert (SITE / "index.html").stat().st_size <= 300_000


def loaded_bytes(browser) -> dict[str, int]:
    """Return the address and size on the disk of all that the page has loaded, itself included."""
    urls = browser.execute_script("return performance.getEntries().map((e) => e.name)")
    paths = {unquote(urlsplit(url).path).lstrip("/") for url in urls if url.startswith("http")}
    return {path: len(gzip.compress((SITE / path).read_bytes())) for path in paths}


@pytest.mark.parametrize(
    "page",
    ["index.html", "use.html", "lessons/01_ring_all_reduce.html", "lessons/06_pipelines_and_bubbles.html"],
)
def test_a_text_page_weighs_300_kb_at_most_until_somebody_searches(browser, site_url, page):
    opened(browser, site_url, page)
    until(browser, "document.readyState === 'complete'")
    time.sleep(1)  # a request that should not be sent would be by now
    loaded = loaded_bytes(browser)
    assert not [path for path in loaded if "search_index" in path]
    assert sum(loaded.values()) <= 300_000, loaded
    box = browser.find_element("css selector", "input[name=query]")
    browser.execute_script("arguments[0].focus()", box)
    box.send_keys("reduce-scatter")
    until(browser, "document.querySelectorAll('.md-search-result__item').length")


def test_a_page_found_by_search_marks_the_words(browser, site_url):
    browser.get(f"{site_url}/use.html?h=planner")
    until(browser, "document.querySelectorAll('.md-content mark').length")


def test_the_layout_that_is_shown_is_the_one_in_the_form(browser, site_url):
    """At first, from the plan that was recorded when the site was built, and after a click on another layout."""
    opened(browser, site_url, "interactive/planner.html")
    until(browser, "document.body.dataset.plan")
    for number in (0, 1):
        browser.execute_script("document.querySelectorAll('#best button')[arguments[0]].click()", number)
        named = until(browser, "document.body.dataset.layout")
        read = "return Number(document.querySelector('#one').elements[arguments[0]].value)"
        for axis in ("dp", "pp", "tp", "cp"):
            size = browser.execute_script(read, axis)
            assert (f"{axis}{size}-" in f"{named}-") == (size > 1), named


def test_the_planners_page_is_minipar_plan(browser, site_url):
    job = dict(model="llama-7b", gpus=16, machine="h100", seq=4096, batch=64)
    want = json.loads(plan_command(**job, as_json=True).text)["best"][0]
    opened(browser, site_url, "interactive/planner.html", **job)
    layout, seconds = until(browser, "document.body.dataset.plan").split()
    assert layout == want["layout"]
    assert float(seconds) == pytest.approx(want["seconds"], rel=1e-12)
    assert layout in browser.execute_script("return document.querySelector('#layout h3').textContent")


def test_a_dragged_order_that_cannot_train_shows_the_cycle(browser, site_url):
    from selenium.webdriver.common.action_chains import ActionChains

    opened(browser, site_url, "interactive/pipeline.html", schedule="gpipe", p=2, m=2)
    until(browser, "document.querySelectorAll('#first .action').length === 8")
    until(browser, "document.querySelector('#status').textContent === ''")
    backward = browser.find_element("css selector", '#first [data-at="0,2"] rect')
    ActionChains(browser).click_and_hold(backward).move_by_offset(-600, 0).release().perform()
    until(browser, "document.querySelector('#status').classList.contains('wrong')")
    assert "cycle: rank 0 -> rank 0" in status(browser)
    assert len(browser.find_elements("css selector", "#first .action")) == 8


def test_the_keyboard_alone_makes_an_order_of_ones_own(browser, site_url):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    opened(browser, site_url, "interactive/pipeline.html", schedule="gpipe", p=2, m=3)
    until(browser, "document.querySelector('#status').textContent === ''")
    for _ in range(60):  # from the top of the page, by tab alone
        ActionChains(browser).send_keys(Keys.TAB).perform()
        if browser.execute_script("return document.activeElement.classList.contains('timeline')"):
            break
    else:
        raise AssertionError("tab never reaches the timeline")
    for _ in range(4):
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
        time.sleep(0.2)
    until(browser, "document.querySelector('#status').textContent.includes('B of microbatch 0')")
    before = drawn(browser)
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT).key_up(Keys.SHIFT).perform()
    until(browser, f"document.body.dataset.drawn !== {json.dumps(before)}")
    assert browser.execute_script("return document.querySelector('#first h3').textContent").startswith(
        "yours"
    )


@pytest.mark.parametrize("settings", [{"p": 0}, {"m": 10**6}, {"schedule": "nonsense", "p": "x"}])
def test_settings_that_cannot_be_are_said_and_the_page_stays_usable(browser, site_url, settings):
    opened(browser, site_url, "interactive/pipeline.html", **settings)
    until(browser, "document.querySelector('#status').classList.contains('wrong')")
    assert "use" in status(browser) or "is not" in status(browser)
    for field, value in (("p", 2), ("m", 2), ("schedule", "gpipe")):
        set_field(browser, "#settings", field, value)
    until(browser, "document.querySelectorAll('#first .action').length === 8")


def test_a_link_carries_the_settings(browser, site_url):
    opened(browser, site_url, "interactive/pipeline.html", schedule="zb-h1", p=3, m=4)
    until(browser, "document.querySelector('#first h3')?.textContent.startsWith('zb-h1')")
    set_field(browser, "#settings", "m", 5)
    until(browser, "location.hash.includes('m=5')")
    assert "schedule=zb-h1" in browser.current_url


def drawn_step(browser) -> str:
    return browser.execute_script("return document.body.dataset.step")


def test_collectives_and_mesh_follow_their_settings(browser, site_url):
    opened(browser, site_url, "interactive/collectives.html")
    set_field(browser, "#settings", "step", 6)
    assert until(browser, "document.body.dataset.step") == "6 1.5"  # 2 (p-1)/p of the vector, on 4 ranks
    set_field(browser, "#settings", "step", 2)  # back: nothing moves
    assert until(browser, "document.body.dataset.step") == "2 0.5"
    assert set_field(browser, "#settings", "step", 3) == 4  # a chunk from each rank
    until(browser, "!document.querySelector('#picture .moving')")
    assert drawn_step(browser) == "3 0.75"
    opened(browser, site_url, "interactive/mesh.html", pp=2, dp=2, tp=2, rank=7)
    assert until(browser, "document.body.dataset.mesh") == "8 7"
    browser.find_element("css selector", '[data-rank="3"]').click()
    until(browser, "document.body.dataset.mesh === '8 3'")


def ran(browser, program: str) -> str:
    """Put a program into the puzzles' editor and run it; return what the page says then."""
    before = browser.execute_script("return document.body.dataset.verdict ?? ''")
    browser.execute_script(
        "const editor = document.querySelector('.editor textarea'); editor.value = arguments[0];"
        "editor.dispatchEvent(new Event('input', {bubbles: true})); document.querySelector('#run').click()",
        program,
    )
    until(browser, f"(document.body.dataset.verdict ?? '') !== {json.dumps(before)}")
    return status(browser)


def test_every_puzzle_is_judged_in_the_page_as_here(browser, site_url):
    opened(browser, site_url, "interactive/puzzles.html")
    for name, puzzle in PUZZLES.items():
        browser.find_element("css selector", f'[data-name="{name}"]').click()
        assert ran(browser, puzzle.answer) == f"{check(puzzle, puzzle.answer).text}."
        assert len(browser.find_elements("css selector", "#picture .action")) > 2
        assert ran(browser, puzzle.stub).endswith("this is where your program goes.")
        assert puzzle.stub.splitlines()[
            int(browser.execute_script("return document.body.dataset.line")) - 1
        ].strip() == ("raise NotImplementedError")


def test_a_puzzles_link_carries_the_program(browser, site_url):
    program = PUZZLES["mlp"].answer
    opened(browser, site_url, "interactive/puzzles.html", puzzle="mlp", program=program)
    read = "return document.querySelector('.editor textarea').value"
    assert browser.execute_script(read) == program
    changed = program.replace("hidden", "h")
    assert ran(browser, changed).startswith("right")
    link = browser.current_url
    browser.get("about:blank")
    browser.get(link)
    assert browser.execute_script(read) == changed
    shown = (
        "return [...document.querySelectorAll('section.puzzle')]"
        ".filter((s) => getComputedStyle(s).display !== 'none').map((s) => s.id)"
    )
    assert browser.execute_script(shown) == ["puzzle-mlp"]


def test_a_broken_program_in_a_link_is_named_and_not_run(browser, site_url):
    broken = "print('ran')\nasync def program(comm, gradient):\n    return )\n"
    opened(browser, site_url, "interactive/puzzles.html", puzzle="ring", program=broken)
    until(browser, "document.querySelector('#status').classList.contains('wrong')")
    assert status(browser) == (
        "Line 3: Python cannot read the program: unmatched ')'. "
        "The program came with the link. Nothing has been run."
    )
    assert browser.execute_script("return document.body.dataset.line") == "3"
    assert not browser.execute_script("return document.body.dataset.verdict ?? ''")
    good = PUZZLES["ring"].answer
    opened(browser, site_url, "interactive/puzzles.html", puzzle="ring", program=good)
    assert status(browser) == "This program came with the link. Nothing has been run."


def test_a_puzzles_messages_play_on_its_timeline(browser, site_url):
    opened(browser, site_url, "interactive/puzzles.html")
    ran(browser, PUZZLES["naive"].answer)
    browser.find_element("css selector", "#picture #play").click()
    until(browser, "document.querySelector('#picture .action.later')")
    until(browser, "document.querySelector('#picture .head').getAttribute('visibility') === 'visible'")
    until(browser, "!document.querySelector('#picture .action.later')")


def test_a_loop_inside_one_line_can_be_stopped(browser, site_url):
    opened(browser, site_url, "interactive/puzzles.html")
    assert "an endless loop?" in ran(
        browser, "async def program(comm, gradient):\n    while True:\n        pass\n"
    )
    browser.execute_script(
        "document.querySelector('.editor textarea').value = arguments[0]; document.querySelector('#run').click();"
        "document.querySelector('#stop').click()",
        "async def program(comm, gradient):\n    return sum(iter(int, 1))\n",
    )
    until(browser, "document.querySelector('#status').textContent === 'stopped'")
    until(browser, "document.body.dataset.python === 'ready'")
    assert ran(browser, PUZZLES["naive"].answer).startswith("right")


def test_puzzles_can_be_read_without_javascript():
    if not html_pages():
        pytest.skip("the site is not built: make site")
    text = (SITE / "interactive" / "puzzles.html").read_text(encoding="utf-8")
    text = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    plain = re.sub(r"<[^>]+>", "", text)
    for number, puzzle in enumerate(PUZZLES.values(), 1):
        assert f"{number}. {puzzle.title}" in plain
    assert text.count("async") >= 2 * len(PUZZLES)  # a stub and an answer each


ASKED = "document.querySelector('details.now')?.id ?? ''"
MISSED = "return JSON.parse(localStorage.getItem('minipar.quiz') ?? '{}')"


def cards_of(browser, site_url: str, chapter: str):
    """Open the cards of a chapter in a browser that has kept nothing."""
    opened(browser, site_url, "cards.html")
    browser.execute_script("localStorage.clear()")
    return opened(browser, site_url, "cards.html", chapter=chapter)


def test_a_missed_card_comes_again_soon_and_first_the_next_time(browser, site_url):
    from selenium.webdriver.common.action_chains import ActionChains

    from minipar.learn.quiz.book import questions_on

    cards_of(browser, site_url, "mesh")
    ids = {question.id for question in questions_on(["mesh"])}
    missed, asked = until(browser, ASKED), []
    while now := browser.execute_script(f"return {ASKED}"):
        asked.append(now)
        shown = "return document.querySelector('details.now').open"
        assert not browser.execute_script(shown)
        keys = ActionChains(browser).send_keys("r")
        keys.perform()
        until(browser, "!document.querySelector('#judge').hidden")
        assert browser.execute_script(shown)
        ActionChains(browser).send_keys("2" if asked == [missed] else "1").perform()
        until(browser, f"({ASKED}) !== {json.dumps(now)} || document.querySelector('#judge').hidden")
    assert asked[5] == missed
    assert set(asked) == ids
    assert len(asked) == len(ids) + 1
    assert browser.execute_script(MISSED)[missed] == {"asked": 2, "missed": 0}
    for one in (missed, asked[1]):
        record = json.dumps({one: {"asked": 1, "missed": 1}})
        browser.execute_script("localStorage.setItem('minipar.quiz', arguments[0])", record)
        opened(browser, site_url, "cards.html", chapter="mesh")
        assert until(browser, ASKED) == one
        assert "1 missed the last time" in status(browser)


def test_a_card_shows_question_answer_and_follow_up_by_keys(browser, site_url):
    from selenium.webdriver.common.action_chains import ActionChains

    from minipar.learn.quiz.book import questions_on

    cards_of(browser, site_url, "zero")
    question = {question.id: question for question in questions_on(["zero"])}[until(browser, ASKED)]
    visible = "return document.querySelector('.practice').innerText"
    said = browser.execute_script(visible)
    assert question.question in said
    assert question.answer not in said
    ActionChains(browser).send_keys("r").perform()
    until(browser, "document.querySelector('details.now').open")
    said = browser.execute_script(visible)
    assert question.answer in said
    assert question.trap in said
    assert question.follow_up in said
    assert question.follow_up_answer not in said
    ActionChains(browser).send_keys("r").perform()
    until(browser, "document.querySelector('details.now details').open")
    assert question.follow_up_answer in browser.execute_script(visible)


@pytest.mark.parametrize("kept", ["{", "[]", '"x"', '{"rank": 3, "gone": {"asked": 1, "missed": 1}}'])
def test_a_record_of_cards_that_is_none_is_passed_over(browser, site_url, kept):
    opened(browser, site_url, "cards.html")
    browser.execute_script("localStorage.setItem('minipar.quiz', arguments[0])", kept)
    opened(browser, site_url, "cards.html", chapter="messages")
    until(browser, ASKED)
    assert "0 missed" in status(browser)


def test_every_card_can_be_read_without_javascript():
    from minipar.learn.quiz.book import book

    if not html_pages():
        pytest.skip("the site is not built: make site")
    text = (SITE / "cards.html").read_text(encoding="utf-8")
    plain = unescape(re.sub(r"<[^>]+>", "", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)))
    for question in book():
        for part in (question.question, question.answer, question.follow_up, question.follow_up_answer):
            assert part in plain
    assert text.count('<details class="card"') == len(book())


def test_from_a_folder_search_works_and_live_pages_give_advice(browser):
    if not html_pages():
        pytest.skip("the site is not built: make site")
    browser.get((SITE / "index.html").as_uri())
    box = browser.find_element("css selector", "input[name=query]")
    browser.execute_script("arguments[0].focus()", box)
    box.send_keys("reduce-scatter")
    until(browser, "document.querySelectorAll('.md-search-result__item').length")
    for page in INTERACTIVE:
        browser.get((SITE / page).as_uri())
        assert "run minipar explore" in status(browser)


@pytest.mark.parametrize(
    "page",
    [
        "index.html",
        "cards.html",
        "exercises.html",
        *INTERACTIVE,
        "lessons/01_ring_all_reduce.html",
        "lessons/03_zero.html",
        "lessons/09_long_context.html",
        "lessons/10_the_mesh.html",
        "lessons/12_before_you_pay.html",
    ],
)
def test_a_phone_has_no_sideways_scroll(browser, site_url, page):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 375, "height": 720, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        loaded(browser, site_url, page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 375
        spilling = (
            "return [...document.querySelectorAll('.interactive button')]"
            ".filter((b) => b.scrollHeight > b.clientHeight || b.scrollWidth > b.clientWidth).map((b) => b.textContent)"
        )
        assert browser.execute_script(spilling) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize(
    "page", ["index.html", "cards.html", "lessons/03_zero.html", "lessons/10_the_mesh.html", *INTERACTIVE]
)
def test_axe_finds_no_serious_violation_in_light_or_dark(browser, site_url, page):
    loaded(browser, site_url, page)
    browser.execute_script(from_npm(AXE, "axe.min.js").decode())
    for scheme in ("default", "slate"):
        browser.execute_script("document.body.setAttribute('data-md-color-scheme', arguments[0])", scheme)
        until(browser, COLOURS_HAVE_FADED)
        found = browser.execute_async_script(
            "const done = arguments[0];"
            "axe.run(document.querySelector('.interactive')).then((r) => done(r.violations))"
        )
        serious = [
            (v["id"], [n["html"][:120] for n in v["nodes"][:3]])
            for v in found
            if v["impact"] in ("serious", "critical")
        ]
        assert serious == [], scheme


@pytest.mark.parametrize("page", ["index.html", "lessons/01_ring_all_reduce.html"])
def test_a_figure_in_the_dark_is_light_on_the_pages_ground(browser, site_url, page):
    from io import BytesIO

    from PIL import Image

    opened(browser, site_url, page)
    picture = browser.find_element("css selector", ".md-content img")
    browser.execute_script(
        "document.body.setAttribute('data-md-color-scheme', 'slate'); arguments[0].loading = 'eager';"
        "arguments[0].scrollIntoView({block: 'center'})",
        picture,
    )
    until(browser, "document.querySelector('.md-content img').complete")
    until(browser, COLOURS_HAVE_FADED)
    image = Image.open(BytesIO(picture.screenshot_as_png)).convert("RGB")
    shades = sorted(image.convert("L").tobytes())
    assert shades[len(shades) // 4] < 80  # the ground
    assert shades[-1] > 180  # lines and letters
    if "ring" in page:  # rank 2's colour, by which its parts are known
        reds, greens, blues = (image.getchannel(part).tobytes() for part in "RGB")
        yellow = sum(r > 150 and g > 140 and b < 100 for r, g, b in zip(reds, greens, blues, strict=True))
        assert yellow > len(shades) / 200


@pytest.mark.parametrize("page", ["index.html", "lessons/06_pipelines_and_bubbles.html"])
def test_axe_finds_nothing_serious_in_the_themes_parts(browser, site_url, page):
    opened(browser, site_url, page)
    browser.execute_script("document.body.setAttribute('data-md-color-scheme', 'default')")
    until(browser, COLOURS_HAVE_FADED)
    browser.execute_script(from_npm(AXE, "axe.min.js").decode())
    found = browser.execute_async_script(
        "const done = arguments[0];"
        "axe.run(document, {runOnly: ['aria-dialog-name', 'color-contrast', 'link-in-text-block']})"
        ".then((r) => done(r.violations))"
    )
    assert [(v["id"], [n["html"][:120] for n in v["nodes"][:5]]) for v in found] == []


def test_what_was_visited_and_all_texts_are_there_without_a_network(browser):
    if not html_pages():
        pytest.skip("the site is not built: make site")
    with served(SITE) as url:
        opened(browser, url, "interactive/puzzles.html")
        worker = (SITE / "offline-worker.js").read_text(encoding="utf-8")
        texts = json.loads(re.search("^const TEXTS = (.*);$", worker, re.MULTILINE)[1])
        assert {lesson_page("03"), "cards.html", "assets/explorable.js"} <= set(texts)
        names = [*texts, "assets/minipar.zip", "assets/pyodide/pyodide.asm.wasm"]
        missing = """return (async () => {
          const missing = [];
          for (const url of arguments[0]) if (!(await caches.match(url))) missing.push(url);
          return missing;
        })()"""
        begin = time.monotonic()
        while left := browser.execute_script(missing, [f"{url}/{name}" for name in names]):
            assert time.monotonic() - begin < LONG_S, left
            time.sleep(0.2)
    opened(browser, url, lesson_page("03"))  # nobody serves it any more
    until(browser, "document.body.dataset.drawn === '8 llama-7b'")
    opened(browser, url, "interactive/puzzles.html")
    assert ran(browser, PUZZLES["naive"].answer).startswith("right")
