import gc
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from baton.errors import ConfigError, ProtocolError, TransferError
from baton.transfer.devices import backing as backing_module
from baton.transfer.devices.backing import DeviceOptions, RangeLocks, open_backing
from baton.transfer.devices.extents import (
    allocate_device_region,
    attach_extent,
    choose_allocation,
    find_extent,
)
from baton.transfer.devices.table import TABLE_BYTES, Extent, Table, read_table, write_table
from baton.transfer.interface import TRANSPORTS, PageArray
from baton.transfer.region import allocate_shared_region, place_arrays, release_region, view_pages
from baton.transfer.transports.shared.remote import map_attached
from baton.transfer.transports.shared.wire import Attached

MIB = 1 << 20
SHAPES = [(4, 100), (8, 4096)]


@pytest.fixture
def device(tmp_path):
    """Two MiB of table and room for four extents of two, full of an earlier life's bytes."""
    path = tmp_path / "device"
    path.write_bytes(b"\xee" * (10 * MIB + 4096))
    return DeviceOptions(str(path))


def claim(device, num_mib=2):
    return allocate_device_region(device, [(num_mib * 256, 4096)])


def write_over_table(device, table):
    with pathlib.Path(device.path).open("r+b") as file:
        at, packed = write_table(table)
        file.seek(at)
        file.write(packed)


def read_over_table(device):
    with pathlib.Path(device.path).open("rb") as file:
        return read_table(file.read(TABLE_BYTES))


def test_a_region_is_zeroed_and_peers_see_it_by_its_id(device):
    region = allocate_device_region(device, SHAPES)
    assert (region.kind, region.fd, len(region.memory)) == ("shared", None, 2 * MIB)
    assert not np.frombuffer(region.memory, np.uint8).any()
    peer = attach_extent(device, find_extent(region).extent.id, region.arrays)
    view_pages(region.memory, region.arrays[1])[3, 5] = 9
    assert view_pages(peer, region.arrays[1])[3, 5] == 9
    peer.close()
    release_region(region)


def test_extents_are_apart_until_they_are_released(device):
    regions = [claim(device) for _ in range(4)]
    starts = [find_extent(region).extent.start for region in regions]
    assert starts == [2 * MIB, 4 * MIB, 6 * MIB, 8 * MIB]
    for number, region in enumerate(regions, start=1):
        np.frombuffer(region.memory, np.uint8)[:] = number
    assert [set(bytes(region.memory)) for region in regions] == [{1}, {2}, {3}, {4}]
    release_region(regions[1])
    again = claim(device)
    assert find_extent(again).extent.start == 4 * MIB
    assert not any(bytes(again.memory))
    for region in (regions[0], regions[2], regions[3], again):
        release_region(region)


def test_a_full_device_says_who_has_it(device):
    held = [claim(device, 4)]
    with pytest.raises(TransferError, match=rf"4194304 are free.*4194304 by pid {os.getpid()} "):
        claim(device, 6)
    held.append(claim(device, 4))
    with pytest.raises(TransferError, match="no room for 2097152 bytes"):
        claim(device)
    for region in held:
        release_region(region)
    release_region(claim(device, 8))


@pytest.mark.parametrize("holder", ["view", "peer"])
def test_bytes_that_somebody_still_maps_are_nobody_elses(device, holder):
    region = claim(device, 8)
    if holder == "view":
        kept = view_pages(region.memory, region.arrays[0])
    else:
        kept = attach_extent(device, find_extent(region).extent.id, region.arrays)
    release_region(region)
    del region
    gc.collect()
    with pytest.raises(TransferError, match="no room"):
        claim(device)
    del kept
    release_region(claim(device))


def test_an_extent_that_was_given_on_is_not_attached_to(device):
    region = claim(device)
    id_, arrays = find_extent(region).extent.id, region.arrays
    release_region(region)
    other = claim(device)
    with pytest.raises(TransferError, match="no extent of"):
        attach_extent(device, id_, arrays)
    release_region(other)


def test_an_extent_that_is_given_on_in_the_last_moment_is_not_attached_to(device, monkeypatch):
    region, others, lock = claim(device, 8), [], RangeLocks.try_lock

    def lock_late(self, *wanted):
        monkeypatch.undo()
        release_region(region)
        others.append(claim(device, 8))
        return lock(self, *wanted)

    id_, arrays = find_extent(region).extent.id, region.arrays
    monkeypatch.setattr(RangeLocks, "try_lock", lock_late)
    with pytest.raises(TransferError, match="just been given"):
        attach_extent(device, id_, arrays)
    release_region(others[0])


@pytest.mark.parametrize(
    ("start", "num_bytes"),
    [
        (0, 2 * MIB),  # the table itself
        (8 * MIB, 4 * MIB),  # behind the end
        (1 << 61, 1 << 61),
        (2 * MIB, 1 << 61),
        (2 * MIB + 4096, 2 * MIB),
        (2 * MIB, 4096),
        (2 * MIB, 0),
    ],
)
def test_a_table_that_lies_maps_nothing(device, start, num_bytes):
    lie = Extent(b"i" * 16, start, num_bytes, 1, "liar")
    write_over_table(device, Table(5, None, (lie,)))
    with pytest.raises(TransferError, match="does not have"):
        attach_extent(device, lie.id, place_arrays(SHAPES))


def test_a_peer_that_describes_more_than_its_extent_has_is_refused(device):
    region = claim(device)
    id_ = find_extent(region).extent.id
    with pytest.raises(TransferError, match="its description needs 2101248"):
        attach_extent(device, id_, (PageArray(4096, 4096, 512),))
    with pytest.raises(TransferError):
        attach_extent(device, id_, (PageArray(-4096, 4096, 1),))
    release_region(region)


def test_a_device_cut_short_is_an_error_before_it_is_touched(device):
    region = claim(device, 4)
    peer = attach_extent(device, find_extent(region).extent.id, region.arrays)
    os.truncate(device.path, 4 * MIB)
    with pytest.raises(TransferError, match="cut short"):
        peer.check_size()
    with pytest.raises(TransferError, match="does not have"):
        attach_extent(device, find_extent(region).extent.id, region.arrays)
    peer.close()
    release_region(region)


def test_what_is_no_dax_device_is_refused(tmp_path):
    small = tmp_path / "small"
    small.write_bytes(bytes(4 * MIB - 1))
    for path, why in (
        ("/dev/zero", "no DAX device"),
        (small, "at least 4194304"),
        (tmp_path / "none", "No such file"),
        ("/dev/full", "no DAX device"),
    ):
        with pytest.raises(ConfigError, match=why):
            allocate_device_region(DeviceOptions(str(path)), SHAPES)
    (tmp_path / "pipe").mkdir()
    with pytest.raises(ConfigError):
        allocate_device_region(DeviceOptions(str(tmp_path / "pipe")), SHAPES)


def test_a_dax_device_tells_its_size_and_alignment(tmp_path, monkeypatch):
    # /dev/zero's number, described as a DAX device: no machine of ours has one.
    monkeypatch.setattr(backing_module, "CHARACTER_DEVICES", tmp_path)
    (tmp_path / "1:5").mkdir()
    (tmp_path / "dax").mkdir()
    (tmp_path / "1:5" / "subsystem").symlink_to(tmp_path / "dax")
    (tmp_path / "1:5" / "size").write_text(f"{5 << 30}\n")
    with open_backing(DeviceOptions("/dev/zero")) as found:
        assert (found.kind, found.table_bytes, found.end_bytes) == ("dax", 2 * MIB, 5 << 30)
    (tmp_path / "1:5" / "align").write_text(f"{1 << 30}\n")
    with open_backing(DeviceOptions("/dev/zero")) as found:
        assert (found.align_bytes, found.table_bytes) == (1 << 30, 1 << 30)


def test_workers_that_would_lock_different_files_are_refused(device, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.touch()
    two.touch()
    region = claim(DeviceOptions(device.path, lock_file=str(one)))
    with pytest.raises(ConfigError, match=r"devices\.forget"):
        claim(DeviceOptions(device.path, lock_file=str(two)))
    other = DeviceOptions(device.path, lock_file=str(two))
    with pytest.raises(TransferError, match="through another file"):
        attach_extent(other, find_extent(region).extent.id, region.arrays)
    release_region(region)
    forget = [sys.executable, "-m", "baton.transfer.devices.forget"]
    assert subprocess.run(forget, capture_output=True, check=False).returncode == 1
    subprocess.run([*forget, device.path], check=True)
    release_region(claim(DeviceOptions(device.path, lock_file=str(two))))


def test_a_table_of_an_earlier_boot_is_begun_anew(device, tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    one.touch()
    two.touch()
    release_region(claim(DeviceOptions(device.path, lock_file=str(one))))
    monkeypatch.setattr(backing_module, "BOOT_ID", tmp_path / "boot")
    (tmp_path / "boot").write_text("another\n")
    region = claim(DeviceOptions(device.path, lock_file=str(two)))
    assert read_over_table(device).locks.boot == "another"
    assert len(read_over_table(device).extents) == 1
    release_region(region)


def test_bytes_locked_by_a_stranger_to_the_table_are_not_taken(device):
    region = claim(device)
    write_over_table(device, Table(7))
    with pytest.raises(TransferError, match="its table does not know"):
        claim(device)
    release_region(region)


def test_the_default_is_a_memfd(device):
    assert choose_allocation({}) is allocate_shared_region
    assert choose_allocation({"tcp": {}, "shared": {}}) is allocate_shared_region
    region = choose_allocation({"shared": {"device": {"path": device.path}}})(SHAPES)
    assert find_extent(region).extent.start == 2 * MIB
    release_region(region)


@pytest.mark.parametrize(
    "wrong", [{}, {"path": ""}, {"path": "x", "flush": "msync"}, {"pth": "x"}, 7]
)
def test_options_that_make_no_sense_are_refused_by_both_ends(wrong):
    options = {"device": wrong}
    with pytest.raises(ConfigError, match="device"):
        choose_allocation({"shared": options})
    with pytest.raises(ConfigError, match="device"):
        TRANSPORTS.build("shared", options)


def test_a_grant_is_one_memory(device):
    region, memfd = claim(device), allocate_shared_region(SHAPES)
    id_ = find_extent(region).extent.id
    with pytest.raises(TransferError, match="this worker has none"):
        map_attached(Attached(region.arrays, id_), None, None)
    for attached, fd in (
        (Attached(region.arrays, id_), os.dup(memfd.fd)),
        (Attached(memfd.arrays), None),
    ):
        with pytest.raises(ProtocolError):
            map_attached(attached, fd, device)
    release_region(region)
    release_region(memfd)
