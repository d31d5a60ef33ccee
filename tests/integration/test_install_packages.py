"""`scripts/install_packages.py`: uv installs from where pip would."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.install_packages import pip_settings, uv_variables

SCRIPT = Path(__file__).parents[2] / "scripts/install_packages.py"

pytestmark = pytest.mark.skipif(
    not Path(sys.executable).with_name("uv").exists(), reason="this environment has no uv: make"
)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with two versions of a package that no index has."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("1.0", "2.0"):
        name = f"baton_of_nowhere-{version}"
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("baton_of_nowhere.py", f"VERSION = {version!r}\n")
            wheel.writestr(
                f"{name}.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: baton-of-nowhere\nVersion: {version}\n",
            )
            wheel.writestr(
                f"{name}.dist-info/WHEEL",
                "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{name}.dist-info/RECORD", "")
    return folder


def install(target: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Install the package into a folder, with further environment variables."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--quiet", "--target", str(target), "baton-of-nowhere"],
        env=kept | {"PIP_NO_INDEX": "1", "UV_CACHE_DIR": str(target.parent / "cache")} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_it_installs_from_where_pip_is_told_to(
    installer: str, wheels: Path, tmp_path: Path
) -> None:
    constraint = tmp_path / "constraints.txt"
    constraint.write_text("baton-of-nowhere<2\n")
    target = tmp_path / "packages"
    found = install(
        target,
        INSTALLER=installer,
        PIP_FIND_LINKS=f"{tmp_path / 'missing'} {wheels}",
        PIP_CONSTRAINT=str(constraint),
    )
    assert found.returncode == 0, found.stderr
    assert (target / "baton_of_nowhere.py").read_text() == "VERSION = '1.0'\n"
    (by,) = target.glob("*.dist-info/INSTALLER")
    assert by.read_text().strip() == installer


def test_what_cannot_be_installed_fails_and_is_named(tmp_path: Path) -> None:
    found = install(tmp_path / "packages", PIP_FIND_LINKS=str(tmp_path))
    assert found.returncode != 0
    assert "baton-of-nowhere" in found.stderr


def test_the_environment_decides_over_files_and_unknown_settings_are_left() -> None:
    settings = pip_settings(
        ":env:.index-url='https://three.test/simple'\n"
        "global.index-url='https://one.test/simple'\n"
        "install.index-url='https://two.test/simple'\n"
        "global.extra-index-url='https://four.test/simple https://five.test/simple'\n"
        "global.trusted-host='three.test'\n"
        "download.cert='/other'\n"
        "global.progress-bar='off'\n"
    )
    assert uv_variables(settings) == {
        "UV_DEFAULT_INDEX": "https://three.test/simple",
        "UV_INDEX": "https://four.test/simple https://five.test/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INSECURE_HOST": "three.test",
    }
