"""`baton store` beside a store of real files."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import sys
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import replace
from json import loads as parse
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from baton.auth.key import ClusterKey
from baton.auth.ticket import bind_salt, hash_tenant
from baton.cli.main import run as run_command
from baton.clock import MachineClock
from baton.errors import StoreError
from baton.handoff.pool_mode.store_access import label_tenant, open_keyed_store
from baton.ops.store import evict
from baton.ops.store_archive import export_entries
from baton.store.folder import entry_files
from baton.store.folder.directory import Folder
from baton.store.folder.shared_capacity import CAPACITY_FILE
from baton.store.interface import NO_TENANT, TenantLabel
from baton.store.tiers.redis import RedisClient
from baton.testing.store_contract import BODY_BYTES, body_of, name_of
from tests.forked_module import run_forked
from tests.integration import patient_doctor
from tests.integration.patient_doctor import TRIED_TRANSPORTS
from tests.store_servers import S3_CREDENTIALS, RedisServer, S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.store.capacity import StoredEntry
    from baton.store.interface import Body

KEY = "5" * 64
TENANT = TenantLabel(b"tenant-A")
CONTENTS = "abcdef"


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> Path:
    """A store with some entries, the first of them the least recently used."""
    folder = tmp_path / "kv"
    key = ClusterKey.from_hex(KEY)
    options = {"file": {"directory": str(folder)}}
    store = open_keyed_store(("file",), options, key=key, clock=MachineClock())
    for age, content in enumerate(reversed(CONTENTS)):
        store.put(name_of(content), body_of(content))
        used_at = MachineClock().unix_now() - 3600 * age
        os.utime(folder / name_of(content).hex(), (used_at, used_at))
    store.close()
    return folder


def run(
    folder: Path, *arguments: str, key: str = KEY, json: bool = True, tiers: str = "file"
) -> tuple[int, Any, str]:
    """Exit code, what was printed, and what was said on standard error.

    A tier `shared` is beside the folder.
    """
    command = ["store", *arguments, "--store", tiers]
    command += ["--json"] if json else []
    command += ["--set", f"store.options.file.directory={folder}"]
    command += ["--set", f"store.options.shared.directory={folder.parent}"]
    code, printed, said = run_here(command, {"BATON_CLUSTER_KEY": key})
    return code, parse(printed) if printed else [], said


def run_here(command: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
    """A command of `baton` in this process: the same, with its text as it was printed."""
    handlers, logging.root.handlers[:] = logging.root.handlers[:], []  # as of a new process
    printed, said = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, variables),
        redirect_stdout(printed),
        redirect_stderr(said),
    ):
        try:
            code = run_command(command)
        except SystemExit as exc:
            code = int(exc.code or 0)
        finally:
            logging.root.handlers[:] = handlers
    return code, printed.getvalue(), said.getvalue()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if len(path.name) == 64}


def flip(folder: Path, content: str) -> None:
    path = folder / name_of(content).hex()
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


def test_stats(folder: Path) -> None:
    code, [tier], _ = run(folder, "stats")
    assert code == 0
    assert (tier["tier"], tier["num_entries"]) == ("file", len(CONTENTS))
    assert 0 < tier["used_bytes"] < tier["capacity_bytes"]
    assert tier["newest_s"] < 3600 < 4.9 * 3600 < tier["oldest_s"]


@pytest.mark.parametrize("is_another_folder", [False, True])
def test_a_folder_that_is_no_store_is_left_as_it_is(
    tmp_path: Path, is_another_folder: bool
) -> None:
    mistyped = tmp_path / "mistyped"
    if is_another_folder:
        mistyped.mkdir(mode=0o700)
    for command in (("stats",), ("verify",), ("evict", "--all"), ("ls",)):
        code, _, errors = run(mistyped, *command)
        assert code == 2
        assert f"no store in {mistyped}" in errors
    assert mistyped.exists() == is_another_folder
    assert not is_another_folder or list(mistyped.iterdir()) == []


def test_ls(folder: Path) -> None:
    code, entries, _ = run(folder, "ls", "--oldest", "--limit", "2")
    assert code == 0
    assert [entry["name"] for entry in entries] == [name_of(c).hex() for c in "ab"]
    assert 5 * 3600 - 1 < entries[0]["last_used_s"] < 5 * 3600 + 600
    assert entries[0]["num_bytes"] >= BODY_BYTES
    code, entries, _ = run(folder, "ls", "--limit", "0")
    assert [entry["name"] for entry in entries] == [name_of(c).hex() for c in reversed(CONTENTS)]
    assert run(folder, "ls", "--limit", "-1")[0] == 2


def test_verify_finds_what_is_damaged_and_removes_it_if_it_is_told_to(folder: Path) -> None:
    assert run(folder, "verify")[0] == 0
    flip(folder, "c")
    before = names(folder)
    code, [tier], _ = run(folder, "verify")
    assert (code, tier["num_damaged"], tier["num_removed"]) == (1, 1, 0)
    assert names(folder) == before
    code, [tier], _ = run(folder, "verify", "--remove")
    assert (code, tier["num_removed"]) == (1, 1)
    assert before - names(folder) == {name_of("c").hex()}
    assert run(folder, "verify")[0] == 0


def test_verify_with_another_key_removes_nothing(folder: Path) -> None:
    before = names(folder)
    code, [tier], errors = run(folder, "verify", "--remove", key="6" * 64)
    assert (code, tier["num_damaged"], tier["num_removed"]) == (1, len(CONTENTS), 0)
    assert "cluster key" in errors
    assert names(folder) == before


def test_evict(folder: Path) -> None:
    code, [tier], _ = run(folder, "evict", "--mib", "0.001")
    assert (code, tier["num_removed"]) == (0, 1)
    assert name_of("a").hex() not in names(folder)  # the least recently used
    _, [tier], _ = run(folder, "evict", "--older-than-hours", "2.5")
    assert tier["num_removed"] == 2
    _, [tier], _ = run(folder, "evict", "--all")
    assert tier["num_removed"] == 3
    assert names(folder) == set()


def test_what_could_not_be_removed_is_reported(folder: Path) -> None:
    """A process that was stopped holds the lock of the counts."""
    flip(folder, "c")
    before = names(folder)
    with closing(Folder(folder)), (folder / CAPACITY_FILE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, [tier], errors = run(folder, "evict", "--all")
        assert (code, tier["num_removed"], tier["num_left"]) == (1, 0, len(CONTENTS))
        assert "still" in errors
        code, [tier], _ = run(folder, "verify", "--remove")
        assert (code, tier["num_damaged"], tier["num_removed"]) == (1, 1, 0)
    assert names(folder) == before
    code, [tier], _ = run(folder, "evict", "--all")
    assert (code, tier["num_removed"], tier["num_left"]) == (0, len(CONTENTS), 0)


def test_a_tenants_entries_are_shown_and_removed(folder: Path, tmp_path: Path) -> None:
    key = ClusterKey.from_hex(KEY)
    by_salt, by_client = (
        label_tenant(key, hash_tenant(salt)) for salt in ("secret", bind_salt("acme", "own"))
    )
    options = {"file": {"directory": str(folder)}}
    store = open_keyed_store(("file",), options, key=key, clock=MachineClock())
    for content, tenant in (("s1", by_salt), ("s2", by_salt), ("c", by_client)):
        store.put(name_of(f"tenant's {content}"), body_of(content), tenant)
    assert store.tiers[0].inner.pin(name_of("tenant's s2"))
    store.close()
    _, [tier], _ = run(folder, "stats")
    assert [(each["tenant"], each["num_entries"]) for each in tier["tenants"]] == [
        (by_salt.hex(), 2),
        (by_client.hex(), 1),
    ]
    salt_file = tmp_path / "salt"
    salt_file.write_text("secret\n")
    code, [tier], _ = run(folder, "evict", "--salt-file", str(salt_file))
    assert (code, tier["num_removed"]) == (0, 2)
    salt_file.write_text("own")
    flags = ("--client-tenant", "acme", "--salt-file", str(salt_file))
    _, [tier], _ = run(folder, "evict", *flags)
    assert tier["num_removed"] == 1
    assert names(folder) == {name_of(content).hex() for content in CONTENTS}


def test_pins_survive_and_are_spared(folder: Path) -> None:
    pinned = name_of("a").hex()
    assert run(folder, "pin", pinned, json=False)[0] == 0
    assert run(folder, "ls", "--oldest")[1][0]["is_pinned"]
    assert run(folder, "stats")[1][0]["pinned_bytes"] > BODY_BYTES
    run(folder, "evict", "--older-than-hours", "0")
    assert names(folder) == {pinned}
    code, _, errors = run(folder, "pin", name_of("missing").hex(), json=False)
    assert (code, name_of("missing").hex() in errors) == (1, True)
    assert run(folder, "pin", "zz", json=False)[0] == 2
    assert run(folder, "pin", json=False)[0] == 2
    assert run(folder, "unpin", pinned, json=False)[0] == 0
    run(folder, "evict", "--older-than-hours", "0")
    assert names(folder) == set()


def test_what_is_exported_is_imported_elsewhere(folder: Path, tmp_path: Path) -> None:
    archive, elsewhere = tmp_path / "kv.archive", tmp_path / "elsewhere"
    code, done, _ = run(folder, "export", str(archive))
    assert (code, done["num_entries"], done["num_bytes"]) == (0, 6, 6 * BODY_BYTES)
    assert archive.stat().st_mode & 0o777 == 0o600
    code, done, _ = run(elsewhere, "import", str(archive))
    assert (code, done["num_entries"], done["num_refused"]) == (0, 6, 0)
    for place in (elsewhere, folder):
        _, entries, _ = run(place, "ls", "--oldest")
        assert [entry["name"] for entry in entries] == [name_of(c).hex() for c in CONTENTS]
    assert run(elsewhere, "verify")[0] == 0
    code, done, _ = run(elsewhere, "import", str(archive))
    assert (code, done["num_entries"], done["num_present"]) == (0, 0, 6)
    code, done, _ = run(folder, "export", str(archive), name_of("b").hex())
    assert (code, done["num_entries"]) == (0, 1)
    code, _, errors = run(tmp_path / "new", "import", str(archive), key="6" * 64)
    assert (code, "cluster key" in errors) == (1, True)
    assert names(tmp_path / "new") == set()


def test_an_import_puts_nothing_into_memory_that_ends_with_it(folder: Path, tmp_path: Path) -> None:
    archive, elsewhere = tmp_path / "kv.archive", tmp_path / "elsewhere"
    assert run(folder, "export", str(archive))[0] == 0
    code, _, errors = run(elsewhere, "import", str(archive), tiers="shared")
    assert (code, "baton store serve" in errors) == (1, True)
    code, done, _ = run(elsewhere, "import", str(archive), tiers="shared,file")
    assert (code, done["num_entries"]) == (0, len(CONTENTS))
    assert len(names(elsewhere)) == len(CONTENTS)
    key, options = ClusterKey.from_hex(KEY), {"shared": {"directory": str(tmp_path)}}
    with closing(open_keyed_store(("shared",), options, key=key, clock=MachineClock())) as user:
        code, done, _ = run(tmp_path / "third", "import", str(archive), tiers="shared,file")
        assert (code, done["num_entries"]) == (0, len(CONTENTS))
        assert len(user.entries()) == len(CONTENTS)


def test_the_memory_of_other_processes_is_left_out(folder: Path) -> None:
    code, found, _ = run(folder, "stats", tiers="host,file")
    assert (code, [tier["tier"] for tier in found]) == (0, ["file"])
    code, _, errors = run(folder, "verify", tiers="host")
    assert (code, "own memory" in errors) == (2, True)


@pytest.mark.parametrize("content", [None, b"", b"BATONKV4 and no archive"])
def test_no_store_is_made_for_what_is_no_archive(tmp_path: Path, content: bytes | None) -> None:
    archive, folder = tmp_path / "kv.archive", tmp_path / "kv"
    if content is not None:
        archive.write_bytes(content)
    code, _, errors = run(folder, "import", str(archive))
    assert (code, str(archive) in errors) == (2 if content is None else 1, True)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evict",), "give one of"),
        (("evict", "--all", "--mib", "1"), "give one of"),
        (("evict", "--mib", "-1"), "no negative number"),
        (("evict", "--mib", "nan"), "no negative number, nor inf or nan"),
        (("evict", "--tenant", "0" * 16), "no tenant's label"),
        (("evict", "--tenant", ""), "no tenant's label"),
        (("evict", "--salt-file", os.devnull), "is empty"),
        (("export", "/"), "is a folder"),
        (("export", "/nowhere/kv.archive"), "there is no folder /nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, errors = run(folder, *arguments)
    assert code == 2
    assert message in errors
    assert len(names(folder)) == len(CONTENTS)


def test_without_a_store_it_says_what_to_give() -> None:
    command = [sys.executable, "-m", "baton.cli", "store", "stats"]
    done = run_forked(command)
    assert done.returncode == 2
    assert "--store" in done.stderr


@pytest.fixture(name="server", params=["redis", "object"])
def server_fixture(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, object], RedisServer | S3Server]]:
    """A tier on a server with some entries: its kind, its options, and the server."""
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    kind = request.param
    server = RedisServer(tmp_path) if kind == "redis" else S3Server()
    options = {"url": server.url} if isinstance(server, RedisServer) else server.options
    options = options | {"timeout_s": 5.0}
    key = ClusterKey.from_hex(KEY)
    store = open_keyed_store((kind,), {kind: options}, key=key, clock=MachineClock())
    for content in CONTENTS:
        tenant = TENANT if content == "a" else NO_TENANT
        store.put(name_of(content), body_of(content), tenant)
    store.close()
    yield kind, options, server
    server.close()


def run_on_server(
    kind: str, options: dict[str, object], *command: str, key: str = KEY, **variables: str
) -> tuple[int, object, str]:
    settings = [f"store.options.{kind}.{name}={value}" for name, value in options.items()]
    settings.append(f'store.tiers=["{kind}"]')
    flags = [text for setting in settings for text in ("--set", setting)]
    variables |= {"BATON_CLUSTER_KEY": key}
    given = [*command, *flags, "--json"]
    if command[0] == "doctor":  # it forks, and this process has threads
        program = [sys.executable, "-m", patient_doctor.__name__, *given]
        done = run_forked(program, env=dict(os.environ, **variables))
        code, printed, said = done.returncode, done.stdout, done.stderr
    else:
        code, printed, said = run_here(given, variables)
    return code, parse(printed) if printed else None, said


def test_commands_on_a_server(
    server: tuple[str, dict[str, object], RedisServer | S3Server],
) -> None:
    kind, options, process = server
    _, [tier], _ = run_on_server(kind, options, "store", "stats")
    assert (tier["tier"], tier["num_entries"]) == (kind, len(CONTENTS))
    assert tier["used_bytes"] > 0
    assert 0 <= tier["newest_s"] <= tier["oldest_s"] < 600
    if kind == "redis":
        code, [tier], _ = run_on_server(kind, options, "store", "verify")
        assert (code, tier["num_entries"], tier["num_damaged"]) == (0, len(CONTENTS), 0)
        evict = ("store", "evict", "--tenant", TENANT.hex())
        _, [tier], _ = run_on_server(kind, options, *evict)
        assert tier["num_removed"] == 1
    _, report, _ = run_on_server(kind, options, "doctor", **{TRIED_TRANSPORTS: ""})
    [finding] = [each for each in report["findings"] if each["area"] == "store"]
    assert "answers in" in finding["found"]
    if kind == "redis":
        assert finding["level"] == "warning"
        assert "no maxmemory" in finding["found"]
    process.kill()
    code, _, errors = run_on_server(kind, options, "store", "stats")
    assert code != 0
    assert kind in errors
    assert "Traceback" not in errors


def test_what_a_server_was_not_asked_for_is_not_left_out_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer is late, after which the server is not asked for a second: nor for the others."""
    server, key = RedisServer(tmp_path), ClusterKey.from_hex(KEY)
    options = {"redis": {"url": server.url, "timeout_s": 5.0}}
    store = open_keyed_store(("redis",), options, key=key, clock=MachineClock())
    for content in CONTENTS:
        store.put(name_of(content), body_of(content), TENANT)
    num_uses: list[str] = []
    use = RedisClient.use

    def be_late_once(self: RedisClient, name: str, max_bytes: int) -> Body | None:
        num_uses.append(name)
        if len(num_uses) % len(CONTENTS) == 1:
            raise StoreError("late")
        return use(self, name, max_bytes)

    monkeypatch.setattr(RedisClient, "use", be_late_once)
    with pytest.raises(StoreError, match="could be looked at"):
        evict(store.tiers, tenant=TENANT)
    assert len(num_uses) == 1, "the others were not asked for"
    monkeypatch.undo()
    store.close()
    store = open_keyed_store(("redis",), options, key=key, clock=MachineClock())
    num_uses.clear()
    monkeypatch.setattr(RedisClient, "use", be_late_once)
    archive = tmp_path / "archive"
    with pytest.raises(StoreError, match="could be looked at"):
        export_entries(store.tiers, archive, key, ())
    assert not archive.exists()
    store.close()
    server.close()


def test_entries_that_are_left_out_of_an_export_end_it_with_exit_code_1(tmp_path: Path) -> None:
    options: dict[str, object] = {"url": f"file://{tmp_path}/bucket"}
    key, archive = ClusterKey.from_hex(KEY), tmp_path / "kv.archive"
    store = open_keyed_store(("object",), {"object": options}, key=key, clock=MachineClock())
    with closing(store):
        store.put(name_of("a"), body_of("a"))
        store.put(name_of("large"), body_of("large", BODY_BYTES + 1))
    export = ("object", options | {"max_entry_bytes": BODY_BYTES}, "store", "export", str(archive))
    code, done, errors = run_on_server(*export)
    assert (code, done["num_entries"], done["num_unreadable"]) == (1, 1, 1)
    assert "max_entry_bytes" in errors
    code, done, _ = run_on_server(*export, name_of("a").hex())
    assert (code, done["num_entries"]) == (0, 1)


def test_a_tenants_entry_that_the_disk_does_not_read_counts_as_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing does not show whose it is: more tenants have entries than it has places for."""
    options = {"file": {"directory": str(folder)}}
    store = open_keyed_store(("file",), options, key=ClusterKey.from_hex(KEY), clock=MachineClock())
    (tier,) = store.tiers
    list_entries, open_file = tier.inner.entries, entry_files.open_unnoticed

    def hide_tenants() -> list[StoredEntry]:
        return [replace(entry, tenant=NO_TENANT) for entry in list_entries()]

    def fail_for_one(name: str, fd: int) -> int:
        if name == name_of("a").hex():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_file(name, fd)

    monkeypatch.setattr(tier.inner, "entries", hide_tenants)
    monkeypatch.setattr(entry_files, "open_unnoticed", fail_for_one)
    (done,) = evict(store.tiers, tenant=TENANT)
    assert (done.num_removed, done.num_left) == (0, 1)
    assert (folder / name_of("a").hex()).exists()
    store.close()
