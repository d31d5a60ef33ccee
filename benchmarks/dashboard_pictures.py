"""Pictures of a gateway's dashboard while an alert fires, for docs/images."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.browser.chromium import chromium
from tests.browser.test_page import DRAWN

WIDTH_PX = 1280
SETTLE_S = 6.0
"""Links and transfers come every 5 s."""

SHOW = """
document.querySelector('#time').hidden = true;
const choice = document.querySelector('#heat-layer');
choice.value = 'FIGURE';
choice.dispatchEvent(new Event('change'));
"""


async def take_picture(url: str, path: Path, alert: str, figure: str) -> None:
    """Alerts, workers and transfers of `url`'s dashboard; charts over time are left out.

    `figure` is the one that the grid of pairs shows.

    Raises:
        AssertionError: the page does not show the alert, or has an error.
    """
    async with chromium() as page:
        await page.resize(WIDTH_PX)
        await page.open(f"{url}/dashboard")
        await page.until(DRAWN)
        await page.until(f"document.querySelector('#alerts-list').textContent.includes('{alert}')")
        await asyncio.sleep(SETTLE_S)
        await page.run(SHOW.replace("FIGURE", figure))
        await asyncio.sleep(0.5)
        bottom = await page.run(
            "document.querySelector('#transfers').getBoundingClientRect().bottom"
        )
        await page.resize(WIDTH_PX, int(bottom) + 8)
        await asyncio.sleep(0.5)
        await page.screenshot(path)
        assert page.problems == [], page.problems
