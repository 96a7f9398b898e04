"""Debian's own Chromium, driven by Playwright, which must not fetch a browser of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import BrowserContext, async_playwright, expect

from tests.command import ROOT

# Debian's names for it, and Google's.
_NAMES = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else ["chromium", "chromium-browser", "google-chrome"]
_CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
MISSING = None if _CHROMIUM else f"no {' or '.join(_NAMES)} here: install Chromium, or set CHROMIUM"

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# A message appears and changes within a second; a busy machine may take its time.
_PATIENCE_MS = 20_000.0
# As many as a palette holds: enough for text on one ground, and a few emoji.
_COLOURS = 256


@contextlib.asynccontextmanager
async def chromium(folder: Path, **options: Any) -> AsyncIterator[BrowserContext]:
    """A browser that was never used before, with its profile in this folder."""
    assert _CHROMIUM, MISSING
    expect.set_options(timeout=_PATIENCE_MS)
    async with (
        async_playwright() as playwright,
        await playwright.chromium.launch_persistent_context(
            folder,
            executable_path=_CHROMIUM,
            args=_FLAGS,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
            device_scale_factor=2,
            locale="en-US",
            timezone_id="Europe/Berlin",
            **options,
        ) as browser,
    ):
        browser.set_default_timeout(_PATIENCE_MS)
        yield browser


def place_of(picture: str, otherwise: Path) -> Path:
    """In docs, if `make screenshots` runs."""
    return (ROOT / "docs" if os.environ.get("UPDATE_SCREENSHOTS") == "1" else otherwise) / picture


def make_small(picture: Path) -> None:
    """A third of what Chromium writes, by a palette; nobody sees the difference."""
    with Image.open(picture) as shot:
        small = shot.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)
