"""What a process holds of the machine, and what is left."""

import os
from pathlib import Path

from baton.launch import resources


def test_memory_is_that_of_all_processes_of_a_session(monkeypatch):
    session = os.getsid(0)
    assert 1 << 20 < resources.count_memory(session) < 1 << 40
    assert resources.free_memory() > 0
    monkeypatch.setattr(resources, "count_memory", lambda _: resources.free_memory() + (1 << 40))
    assert not resources.has_room_for_another(session)
    monkeypatch.setattr(resources, "count_memory", lambda _: 1)
    assert resources.has_room_for_another(session)


def test_an_open_device_is_seen(monkeypatch, tmp_path):
    device = tmp_path / "device0"
    device.write_text("")
    monkeypatch.setattr(resources, "DEVICE_FILES", (f"{tmp_path}/device",))
    session = os.getsid(0)
    assert not resources.holds_device(session)
    with Path(device).open():
        assert resources.holds_device(session)
        assert not resources.has_room_for_another(session)
