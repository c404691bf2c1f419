"""A real browser on the built site, served on loopback: only where both are there, as after `make site`."""

from __future__ import annotations

import shutil
import tempfile

import pytest

from tests.website.serving import served
from website.build import SITE


@pytest.fixture(scope="session")
def site_url():
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make site")
    with served(SITE) as url:
        yield url


@pytest.fixture(scope="session")
def browser():
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: pip install '.[site]'"
    )
    options = webdriver.ChromeOptions()
    profile = tempfile.TemporaryDirectory()
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--window-size=1280,900",
        f"--user-data-dir={profile.name}",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()
    profile.cleanup()
