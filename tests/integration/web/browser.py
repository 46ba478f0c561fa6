"""A real Chromium without a screen, if there is one on this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)

WIDE, NARROW = (1440, 1000), (390, 844)


def need_chromium() -> tuple[str, str]:
    """The paths of Chromium and of its driver; skips the test if one is missing."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    return chromium, driver


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser with an empty profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    program, driver = need_chromium()
    options = Options()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=Service(driver))
        try:
            yield browser
        finally:
            browser.quit()


def resize(browser: Any, size: tuple[int, int]) -> None:
    """Show the page in a window of so many pixels, however small."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(browser: Any, **features: str) -> None:
    """What the reader prefers: ``color_scheme="dark"``, ``reduced_motion="reduce"``."""
    wanted = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
