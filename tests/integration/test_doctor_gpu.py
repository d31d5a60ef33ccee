"""What `baton doctor` says of `cuda_ipc` on a host that has no GPU."""

import ctypes

import pytest

from baton.ops.doctor.finding import Level
from baton.ops.doctor.host import this_host
from baton.ops.doctor.transports import ChosenTransports, check_transport


@pytest.mark.parametrize(
    ("configured", "level"), [(("shared",), Level.NOTE), (("cuda_ipc", "shared"), Level.WARNING)]
)
def test_cuda_ipc_without_a_gpu_says_why(configured, level):
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this host has NVIDIA's driver")
    (finding,) = check_transport("cuda_ipc", ChosenTransports(configured, {}), this_host())
    assert finding.level is level
    assert finding.found == (
        "does not work: the transport cuda_ipc needs an NVIDIA GPU and its driver: "
        "no libcuda.so.1 here"
    )
