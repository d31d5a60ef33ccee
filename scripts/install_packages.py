"""Install packages into this Python's environment with uv, from where pip would take them.

`python scripts/install_packages.py ARGUMENTS` is `python -m pip install ARGUMENTS`, in a tenth of
the time. uv does not read pip's configuration: indexes, proxies, certificates and constraints that
a company or a machine sets for pip are handed on, unless uv's own variables name others. Where uv
cannot be installed, or with `INSTALLER=pip`, pip itself installs (docs/adr/0081).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

UV = "uv==0.13.9"
# pip's setting, uv's variable, what separates several of them in uv's.
VARIABLES = (
    ("index-url", "UV_DEFAULT_INDEX", None),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("constraint", "UV_CONSTRAINT", " "),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("cert", "SSL_CERT_FILE", None),
    ("proxy", "ALL_PROXY", None),
    ("default-timeout", "UV_HTTP_TIMEOUT", None),
    ("timeout", "UV_HTTP_TIMEOUT", None),
    ("no-index", "UV_NO_INDEX", None),
)
SECTIONS = ("global", "install", ":env:")  # the later one decides


def pip_settings(listed: str) -> dict[str, str]:
    """Read what `pip config list` prints, `section.name='value'` by line: values by name."""
    found: dict[tuple[int, str], str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in SECTIONS:
            found[SECTIONS.index(section), name] = str(ast.literal_eval(value))
    return {name: value for (_, name), value in sorted(found.items())}


def uv_variables(settings: dict[str, str]) -> dict[str, str]:
    """The environment variables that give uv the same settings."""
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: the best of all indexes
    for name, variable, separator in VARIABLES:
        values = settings.get(name, "").split()
        # uv stops at a folder that does not exist, where pip warns.
        values = [value for value in values if name != "find-links" or is_there(value)]
        if values:
            variables[variable] = values[-1] if separator is None else separator.join(values)
    return variables


def is_there(place: str) -> bool:
    """Whether a path or `file:` URL exists. Of other URLs nothing is known before they are used."""
    url = urlsplit(place)
    if url.scheme not in ("", "file"):
        return True
    return Path(url2pathname(url.path)).exists()


def main(arguments: list[str]) -> int:
    """Install, and return the installer's exit status."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    uv = Path(sys.executable).with_name("uv")
    wants_uv = os.environ.get("INSTALLER") != "pip"
    if wants_uv and not uv.exists() and subprocess.call([*pip, "install", "--quiet", UV]):
        print("No uv: pip installs, which takes some minutes.", file=sys.stderr)
    if not wants_uv or not uv.exists():
        return subprocess.call([*pip, "install", *arguments])
    listed = subprocess.check_output([*pip, "config", "list"], text=True)
    environment = uv_variables(pip_settings(listed)) | dict(os.environ)
    command = [str(uv), "pip", "install", "--python", sys.executable, *arguments]
    return subprocess.call(command, env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
