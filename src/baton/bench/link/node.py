"""The measured process of `baton bench link`: transports, upper limits and peers."""

import sys
from typing import Final

from baton.bench.link.backends import build_backend
from baton.rig.node import run_node

COMMAND: Final = (sys.executable, "-m", "baton.bench.link.node")

if __name__ == "__main__":
    run_node(build_backend)
