"""A hook of mkdocs (`mkdocs.yml`): links from a page to files outside docs/, which the site lacks.

On a code host such a link opens the file; on the site it becomes the file's path. A file that does
not exist fails a strict build, as a broken link between pages does.
"""

import logging
import re
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[1]
_log = logging.getLogger("mkdocs.hooks.docs_links")
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


class _File(Protocol):
    src_uri: str
    abs_src_path: str


class _Page(Protocol):
    file: _File


def on_page_markdown(markdown: str, *, page: _Page, **_: object) -> str:
    """Replace the links of one page; called by mkdocs."""
    source = Path(page.file.abs_src_path)

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        file = (source.parent / target).resolve()
        if file.is_relative_to(ROOT / "docs"):
            return link[0]
        if not file.exists():
            _log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        path = f"`{file.relative_to(ROOT)}`"
        return path if text.strip("`") == path.strip("`") else f"{text} ({path})"

    return _LINK.sub(replace, markdown)
