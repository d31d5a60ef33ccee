"""The pages under docs/wire name the versions that the code sends."""

from __future__ import annotations

import re
from pathlib import Path

from baton.handoff.messages import PROTOCOL_VERSION
from baton.net.framing import MAGIC

WIRE = Path(__file__).parents[3] / "docs/wire"


def test_the_handoff_page_names_the_version_of_hello():
    page = (WIRE / "handoff.md").read_text()
    assert re.findall(r"`version`=(\d+)", page) == [str(PROTOCOL_VERSION)]


def test_the_transfer_page_names_the_version_of_the_handshake():
    page = (WIRE / "transfer.md").read_text()
    assert re.findall(r"^Version (\d+)\.", page, re.MULTILINE) == [str(MAGIC[-1])]
    assert f'"BATON" {MAGIC[-1]:02}' in page
