"""Extract the demo model's training text from Debian's `r-cran-janeaustenr`.

The package carries Jane Austen's six novels (1811 to 1817, in the public domain) as R data:

    apt-get download r-cran-janeaustenr
    pip install rdata
    python scripts/extract_austen.py r-cran-janeaustenr_1.0.0-1_all.deb --out /tmp/austen

writes one plain UTF-8 file per novel, and prints its SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import tempfile
import warnings
import zlib
from pathlib import Path

import rdata

_DATA_FOLDER = Path("usr/lib/R/site-library/janeaustenr/data")
_LENGTH_PREFIX_BYTES = 4
"""Each entry of an `.rdb` starts with its uncompressed length; zlib knows where it ends."""


def read_novels(package: Path) -> dict[str, str]:
    """The novels in a `.deb`: the data set's name, then its text with the original line breaks."""
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["dpkg-deb", "-x", str(package), unpacked], check=True)
        folder = Path(unpacked) / _DATA_FOLDER
        index = rdata.read_rds(folder / "Rdata.rdx")
        database = (folder / "Rdata.rdb").read_bytes()
    return {
        str(name): _decode_entry(database[offset : offset + size])
        for name, (offset, size) in index["variables"].items()
    }


def _decode_entry(entry: bytes) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # a bare serialised object has no file header: rdata says so
        parsed = rdata.parser.parse_data(zlib.decompress(entry[_LENGTH_PREFIX_BYTES:]))
    return "\n".join(str(line) for line in rdata.conversion.convert(parsed)) + "\n"


def main() -> None:
    """Write one text file per novel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", type=Path, help="r-cran-janeaustenr_*.deb")
    parser.add_argument("--out", type=Path, required=True, help="folder for the text files")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, text in read_novels(arguments.package).items():
        encoded = text.encode()
        (arguments.out / f"{name}.txt").write_bytes(encoded)
        print(f"{hashlib.sha256(encoded).hexdigest()}  {name}.txt  {len(encoded)} bytes")


if __name__ == "__main__":
    main()
