import pytest

from baton.bench.architectures.usage import Counter, EnergyMeter, joules_between


@pytest.fixture
def zone(tmp_path):
    def write(name, energy_uj, most_uj=1000, kind="package-0"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(f"{kind}\n")
        (folder / "energy_uj").write_text(f"{energy_uj}\n")
        (folder / "max_energy_range_uj").write_text(f"{most_uj}\n")

    return write


def rapl_of(meter):
    return {name: c for name, c in meter.read().items() if name.startswith("intel-rapl")}


def test_packages_are_read_and_their_parts_are_not(tmp_path, zone):
    zone("intel-rapl:0", 5, most_uj=99)
    zone("intel-rapl:1", 7)
    zone("intel-rapl:0:0", 3)  # a part of the first package
    zone("dtpm", 9)
    assert rapl_of(EnergyMeter(tmp_path)) == {
        "intel-rapl:0": Counter(5, 99),
        "intel-rapl:1": Counter(7, 1000),
    }


def test_the_platform_is_not_added_to_the_packages_that_are_in_it(tmp_path, zone):
    zone("intel-rapl:0", 5)
    zone("intel-rapl:1", 17, kind="psys")
    assert rapl_of(EnergyMeter(tmp_path)) == {"intel-rapl:0": Counter(5, 1000)}


def test_what_cannot_be_read_is_left_out(tmp_path, zone):
    zone("intel-rapl:0", "secret")
    (tmp_path / "intel-rapl:1").mkdir()
    assert rapl_of(EnergyMeter(tmp_path)) == {}
    assert rapl_of(EnergyMeter(tmp_path / "absent")) == {}


def test_joules_are_of_counters_in_both_readings_and_one_may_begin_anew():
    before = {"a": Counter(900_000, 1_000_000), "b": Counter(10, None), "gone": Counter(1, None)}
    after = {"a": Counter(400_000, 1_000_000), "b": Counter(500_010, None)}
    assert joules_between(before, after) == pytest.approx(0.5 + 0.5)
    assert joules_between({}, after) is None
    assert joules_between({"gpu-0": Counter(9, None)}, {"gpu-0": Counter(1, None)}) == 0.0
