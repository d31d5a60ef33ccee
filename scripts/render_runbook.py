"""Render what to do about each alert as a page of the dashboard, from docs/observability/alerts.md.

`python scripts/render_runbook.py` writes it; a test compares. Links to other pages of the
documentation, which a gateway does not serve, become the names of those pages.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import markdown

from baton.protocol.alerts import AlertName

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = "docs/observability/alerts.md"
PAGE: Final = ROOT / "src/baton/gateway/dashboard/static/runbook.html"
LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
ANCHORS: Final = frozenset(name.lower() for name in AlertName)
FRAME: Final = """\
<!doctype html>
<!-- Rendered from {source} by scripts/render_runbook.py; change these, not this file. -->
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>Baton: what to do about an alert</title>
    <link rel="icon" href="icon.svg">
    <link rel="stylesheet" href="style.css">
  </head>
  <body>
    <header>
      <h1>What to do about an alert</h1>
      <nav aria-label="Pages"><a href="./">dashboard</a></nav>
    </header>
    <main class="runbook">
{sections}
    </main>
  </body>
</html>
"""


def make_page() -> str:
    """The page, with a section for each alert under its name in lower case."""
    text = (ROOT / SOURCE).read_text("utf-8")
    return FRAME.format(source=SOURCE, sections="\n".join(_sections(text)))


def _sections(text: str) -> Iterator[str]:
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        if title.lower() in ANCHORS:
            linked = LINK.sub(_rewrite, body)
            shown = markdown.markdown(linked, extensions=["tables", "fenced_code"])
            name = html.escape(title)
            yield f'<section class="panel" id="{name.lower()}">'
            yield f"<h2>{name}</h2>\n{shown}\n</section>"


def _rewrite(link: re.Match[str]) -> str:
    """A link that leads to an alert on this page, or a text that names the other page."""
    shown, target = link.groups()
    path, _, anchor = target.partition("#")
    if not path and anchor in ANCHORS:
        return link.group()
    page = posixpath.normpath(posixpath.join(posixpath.dirname(SOURCE), path)) if path else SOURCE
    return f"{shown} ({page})"


if __name__ == "__main__":
    PAGE.write_text(make_page(), "utf-8")
