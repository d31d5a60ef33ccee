"""Which Ray is refused, before Ray itself is imported."""

import importlib.metadata
import sys
import threading
from contextlib import redirect_stdout

import pytest

from baton.errors import ConfigError
from baton.launch.ray.connection import (
    RAYS_ERROR_THREAD,
    WithoutRaysErrors,
    check_ray,
    describe,
    find_address,
    require_token,
    require_version,
)

TOKENS = {"RAY_AUTH_MODE": "token"}


def test_versions():
    require_version("2.60.0")
    require_version("3.0.0rc1")
    for old in ("2.59.9", "2.9.0", "1.99.0"):
        with pytest.raises(ConfigError, match=r"2\.60 or newer"):
            require_version(old)


def test_ray_without_tokens(tmp_path):
    for environment in ({}, {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}):
        with pytest.raises(ConfigError, match="--insecure-ray"):
            require_token(environment, tmp_path)


def test_the_tokens_file_is_the_owners_alone(tmp_path):
    path = tmp_path / "token"
    environment = TOKENS | {"RAY_AUTH_TOKEN_PATH": str(path)}
    with pytest.raises(ConfigError, match="cannot read Ray's token"):
        require_token(environment, tmp_path)
    path.write_text("secret")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        require_token(environment, tmp_path)
    path.chmod(0o600)
    require_token(environment, tmp_path)


def test_rays_own_file_and_variable_count_too(tmp_path):
    with pytest.raises(ConfigError, match="auth_token"):
        require_token(TOKENS, tmp_path)
    require_token(TOKENS | {"RAY_AUTH_TOKEN": "x"}, tmp_path)
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("secret")
    path.chmod(0o600)
    require_token(TOKENS, tmp_path)


def test_insecure_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.60.0")
    check_ray({}, insecure=True)
    assert "without token authentication" in caplog.text


def test_without_ray(monkeypatch):

    def missing(_):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(ConfigError, match=r"pip install 'baton-kv\[ray\]'"):
        check_ray(TOKENS, insecure=False)


def test_addresses():
    assert find_address("a:1", {"RAY_ADDRESS": "b:2"}) == "a:1"
    assert find_address(None, {"RAY_ADDRESS": "b:2"}) == "b:2"
    assert find_address(None, {}) == "auto"


def test_a_remote_traceback_is_its_last_line():
    assert describe(ValueError("Traceback:\n  File x\n\nConfigError: no\n")) == "ConfigError: no"


def test_what_ray_prints_of_the_cluster_is_not_in_a_commands_output(capsys):
    with redirect_stdout(WithoutRaysErrors(sys.stdout)):
        rays = threading.Thread(target=print, args=("a node is dead",), name=RAYS_ERROR_THREAD)
        rays.start()
        rays.join()
        print("{}")
    assert capsys.readouterr() == ("{}\n", "a node is dead\n")
