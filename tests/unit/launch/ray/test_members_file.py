"""A gateway's members file, while supervisors answer, do not answer, and Ray's head is away."""

import asyncio

import msgspec

from baton.launch.errors import FleetError
from baton.launch.fleet import FleetMember
from baton.launch.ray.members_file import MembersFileWriter
from baton.protocol.members import decode_members


class Supervisors:
    """Those of a fleet: `reports` by name; None: no answer. `names` None: Ray's head is away."""

    def __init__(self):
        self.names, self.reports = frozenset(), {}

    async def list_names(self, timeout_s):
        if self.names is None:
            raise FleetError("no head")
        return self.names

    async def call(self, name, method, *arguments, timeout_s):
        assert method == "status"
        if self.reports.get(name) is None:
            raise FleetError("no answer")
        return self.reports[name]

    def set(self, name, url, state="ready"):
        role = name.partition("-")[0]
        member = FleetMember(name=name, role=role, state=state, host="h", url=url)
        self.reports[name] = msgspec.json.encode(member)
        self.names = (self.names or frozenset()) | {name}


def run(path, *steps):
    """Poll after each step; what the file then has, by address."""
    supervisors = Supervisors()
    writer = MembersFileWriter(supervisors, path)
    found = []
    for step in steps:
        step(supervisors)
        asyncio.run(writer.poll())
        found.append({w.url: w.draining for w in decode_members(path.read_bytes()).workers})
    return found


def lose_head(supervisors):
    supervisors.names = None


def test_workers_come_drain_and_go(tmp_path):
    path = tmp_path / "members.json"
    assert run(
        path,
        lambda s: None,
        lambda s: s.set("decode-0", "https://a:1"),
        lambda s: s.set("decode-0", "https://a:1", "draining"),
        lambda s: setattr(s, "names", frozenset()),
    ) == [{}, {"https://a:1": False}, {"https://a:1": True}, {}]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_worker_that_moved_has_its_new_address_alone(tmp_path):
    assert run(
        tmp_path / "members.json",
        lambda s: s.set("decode-0", "https://a:1"),
        lambda s: s.reports.update({"decode-0": None}),
        lambda s: s.set("decode-0", None, "starting"),
        lambda s: s.set("decode-0", "https://b:1"),
    ) == [{"https://a:1": False}, {"https://a:1": False}, {}, {"https://b:1": False}]


def test_without_rays_head_the_list_stays_and_workers_are_asked(tmp_path):
    assert run(
        tmp_path / "members.json",
        lambda s: s.set("decode-0", "https://a:1"),
        lose_head,
        lambda s: s.reports.update({
            "decode-0": msgspec.json.encode(
                FleetMember(
                    name="decode-0", role="decode", state="ready", host="h", url="https://a:2"
                )
            )
        }),
    ) == [{"https://a:1": False}, {"https://a:1": False}, {"https://a:2": False}]


def test_the_file_is_written_only_when_it_changes(tmp_path):
    path = tmp_path / "members.json"
    supervisors = Supervisors()
    supervisors.set("decode-0", "https://a:1")
    writer = MembersFileWriter(supervisors, path)
    asyncio.run(writer.poll())
    before = path.stat().st_ino
    asyncio.run(writer.poll())
    assert path.stat().st_ino == before


def test_a_file_that_cannot_be_written_is_written_later(tmp_path, caplog):
    folder = tmp_path / "folder"
    supervisors = Supervisors()
    supervisors.set("decode-0", "https://a:1")
    writer = MembersFileWriter(supervisors, folder / "members.json")
    for _ in range(3):
        asyncio.run(writer.poll())
    assert caplog.text.count("cannot write") == 1
    folder.mkdir()
    asyncio.run(writer.poll())
    workers = decode_members((folder / "members.json").read_bytes()).workers
    assert [each.url for each in workers] == ["https://a:1"]


def test_what_is_no_report_changes_nothing(tmp_path):
    assert (
        run(
            tmp_path / "members.json",
            lambda s: s.set("decode-0", "https://a:1"),
            lambda s: s.reports.update({"decode-0": b"{}"}),
            lambda s: s.reports.update({"decode-0": "text"}),
        )
        == [{"https://a:1": False}] * 3
    )
