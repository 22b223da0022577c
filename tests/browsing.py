"""Opening pages in a real browser, and measuring their colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def visit(browser: Any, page: Path, width: int = 1400, scheme: str = "light") -> None:
    """Open a page at a width and in a colour scheme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": features})
    browser.get_log("browser")
    browser.get(page.as_uri())


def luminance(colour: str) -> float:
    """WCAG's relative luminance of an rgb() colour."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """WCAG's contrast of two colours."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def style(browser: Any, where: str, name: str) -> str:
    """A computed property of the first element that a selector matches."""
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return str(browser.execute_script(script, where, name))


def check_whole(browser: Any) -> None:
    """The page has logged nothing, and is not wider than its window."""
    assert browser.get_log("browser") == []
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth") <= 0
