"""Which credentials a kubeconfig gives, as kubectl reads it."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import json
import os
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.launch.kubernetes.cluster import find_cluster
from baton.launch.kubernetes.kubeconfig import read_kubeconfig
from baton.net.kubernetes import access
from baton.net.kubernetes.access import KubernetesApiError, ServiceAccount
from tests.integration.test_gateway_tls import certificate_files

pytest.importorskip("yaml")
SERVER = "https://10.0.0.1:6443"


def write(path: Path, user: dict, cluster: dict | None = None, context: str = "here") -> Path:
    named = {"server": SERVER} | (cluster or {})
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({
            "current-context": context,
            "contexts": [{"name": context, "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": named}],
            "users": [{"name": "u", "user": user}],
        })
    )
    return path


def credentials(path: Path):
    return asyncio.run(read_kubeconfig([path], None).find_credentials())


def test_a_token_or_its_file_which_is_read_again(tmp_path):
    assert credentials(write(tmp_path / "config", {"token": "abc"})).token == "abc"
    found = read_kubeconfig([write(tmp_path / "config", {"tokenFile": "token"})], None)
    for token in ("first", "second"):
        (tmp_path / "token").write_text(f"{token}\n")
        assert asyncio.run(found.find_credentials()).token == token
    assert (found.url, found.namespace, found.context) == (SERVER, "default", "here")
    assert "first" not in repr(found)


def test_client_certificates_and_authorities_from_data_and_from_files(tmp_path):
    certificate, key = certificate_files(tmp_path, 1)
    as_data = {
        "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(key.read_bytes()).decode(),
    }
    as_files = {"client-certificate": "tls.crt", "client-key": str(key)}
    authority = {"certificate-authority": "tls.crt", "tls-server-name": "kubernetes"}
    for user in (as_data, as_files):
        found = credentials(write(tmp_path / "config", user, authority))
        assert (found.token, found.server_name) == (None, "kubernetes")
        assert found.tls is not None
        assert len(found.tls.get_ca_certs()) == 1
    other_key = as_data | {"client-key-data": base64.b64encode(b"no key").decode()}
    with pytest.raises(KubernetesApiError, match="cannot be used"):
        credentials(write(tmp_path / "config", other_key, authority))


def test_an_empty_value_is_none_as_kubectl_reads_it(tmp_path):
    certificate, _ = certificate_files(tmp_path, 1)
    empty = {"token": "", "client-certificate-data": "", "client-key-data": ""}
    user = plugin(tmp_path, {"token": "made"}) | empty | {"client-certificate": "", "tokenFile": ""}
    cluster = {"certificate-authority-data": "", "certificate-authority": str(certificate)}
    found = credentials(write(tmp_path / "config", user, cluster))
    assert found.token == "made"
    assert found.tls is not None
    assert len(found.tls.get_ca_certs()) == 1


def test_an_empty_file_of_authorities_does_not_make_it_the_systems(tmp_path):
    (tmp_path / "ca.crt").write_text("\n")
    path = write(tmp_path / "config", {"token": "t"}, {"certificate-authority": "ca.crt"})
    with pytest.raises(KubernetesApiError, match="certificate-authority is empty"):
        credentials(path)


PLUGIN = """#!/bin/sh
echo run >> "$COUNT"
case "$KUBERNETES_EXEC_INFO" in *'"interactive":false'*"$WANTED"*) ;; *) exit 7;; esac
cat "$1"
"""


def plugin(tmp_path: Path, made: object, *, wanted: str = "") -> dict:
    script = tmp_path / "plugin.sh"
    script.write_text(PLUGIN)
    script.chmod(0o700)
    (tmp_path / "made").write_text(json.dumps({"kind": "ExecCredential", "status": made}))
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "./plugin.sh",
            "args": [str(tmp_path / "made")],
            "env": [
                {"name": "COUNT", "value": str(tmp_path / "count")},
                {"name": "WANTED", "value": wanted},
            ],
            "provideClusterInfo": bool(wanted),
        }
    }


def test_an_exec_plugin_makes_the_token_and_is_run_again_when_it_expires(tmp_path):
    for lasts_s, num_runs in ((3600, 1), (30, 2)):
        (tmp_path / "count").unlink(missing_ok=True)
        expires = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=lasts_s)
        made = {"token": "made", "expirationTimestamp": expires.isoformat()}
        user = plugin(tmp_path, made, wanted=f'"cluster":{{"server":"{SERVER}"')
        found = read_kubeconfig([write(tmp_path / "config", user)], None)

        async def twice(found=found) -> None:
            for _ in range(2):
                assert (await found.find_credentials()).token == "made"

        asyncio.run(twice())
        assert (tmp_path / "count").read_text().count("run") == num_runs


@pytest.mark.parametrize(
    ("changes", "made", "said"),
    [
        ({"command": "./absent", "installHint": "get it there"}, {}, "get it there"),
        ({"args": ["/absent"]}, {}, "exit code"),
        ({}, {}, "neither a token nor a certificate"),
        ({}, {"token": 7}, "printed no ExecCredential"),
    ],
)
def test_a_plugin_that_fails_is_named(tmp_path, changes, made, said):
    user = plugin(tmp_path, made)
    user["exec"] |= changes
    with pytest.raises(KubernetesApiError, match=said):
        credentials(write(tmp_path / "config", user))


def test_a_plugin_of_another_machine_type_is_named(tmp_path):
    user = plugin(tmp_path, {})
    (tmp_path / "plugin.sh").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(KubernetesApiError, match=r"plugin\.sh cannot be run: Exec format error"):
        credentials(write(tmp_path / "config", user))


@pytest.mark.parametrize(
    ("user", "cluster", "said"),
    [
        ({"username": "u", "password": "p"}, {}, "username and auth-provider"),
        ({"auth-provider": {"name": "gcp"}}, {}, "username and auth-provider"),
        ({"token": "t", "as": "admin"}, {}, "impersonation"),
        ({"token": "t"}, {"insecure-skip-tls-verify": True}, "certificate-authority"),
        ({"token": "t"}, {"proxy-url": "http://p"}, "kubectl proxy"),
        ({"token": "t"}, {"server": "http://10.0.0.1"}, "without TLS"),
        ({"token": "t"}, {"server": "10.0.0.1"}, "is no URL"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, user, cluster, said):
    with pytest.raises(ConfigError, match=said):
        read_kubeconfig([write(tmp_path / "config", user, cluster)], None)


def test_a_proxy_on_this_host_needs_no_tls(tmp_path):
    file = write(tmp_path / "config", {}, {"server": "http://127.0.0.1:8001/"})
    assert read_kubeconfig([file], None).url == "http://127.0.0.1:8001"
    found = credentials(file)
    assert (found.token, found.tls) == (None, None)


def test_of_several_files_the_first_counts(tmp_path):
    first = write(tmp_path / "one", {"token": "one"}, context="a")
    second = write(tmp_path / "two", {"token": "two"}, {"server": "https://x"}, context="b")
    paths = [tmp_path / "absent", first, second]
    assert read_kubeconfig(paths, None).user.token == "one"
    assert read_kubeconfig(paths, "b").url == SERVER  # its cluster is called as the first one's
    with pytest.raises(ConfigError, match="no context 'c'; it has a, b"):
        read_kubeconfig(paths, "c")
    (tmp_path / "one").write_text("{unfinished")
    with pytest.raises(ConfigError, match="one cannot be used"):
        read_kubeconfig(paths, None)
    with pytest.raises(ConfigError, match="no kubeconfig at"):
        read_kubeconfig([tmp_path / "absent"], None)


def test_without_a_kubeconfig_it_is_this_pods_account(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert os.environ["HOME"] == str(Path.home())
    with pytest.raises(ConfigError, match="no cluster is known"):
        find_cluster({}, None)
    monkeypatch.setattr(access, "ACCOUNT", tmp_path)
    (tmp_path / "namespace").write_text("mine\n")
    found = find_cluster({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, None)
    assert isinstance(found.access, ServiceAccount)
    assert (found.access.url, found.namespace) == ("https://10.96.0.1:443", "mine")
    write(tmp_path / ".kube" / "config", {"token": "t"})
    assert find_cluster({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, None).name == "context here"
