"""What a vLLM server and its processes import before their model loads (`tests.preloaded`)."""

import gc
import multiprocessing
import os
import signal
import socket
import stat
import warnings
from importlib import import_module
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # read on import
# The first request for log-probabilities would compile a function, for 2 to 12 s in each server.
os.environ["TORCH_COMPILE_DISABLE"] = "1"
os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}

gc.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.model_executor.models.llama",
        "vllm.v1.worker.cpu_worker",
        "baton.cli.serving",
        "baton.engines.vllm.connector",
        "baton.engines.vllm.rank",
        "baton.engines.vllm.serving",
        "tests.preloaded_modules",
    ):
        import_module(_name)
    from vllm import plugins
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    from baton.engines.lookup_cost import LookupCost
# Unless it is known what a token takes, every prompt is looked for, and what is found is loaded.
# Learned on a busy machine, with a tiny model, it would tell now and then that neither pays.
LookupCost.observe_step = lambda *_: None
gc.freeze()  # see `tests.preloaded_modules`
gc.enable()
# As an engine ends vLLM searches all of this for garbage: two seconds of processor time each.
gc.unfreeze = lambda: None
# An engine and its worker wait for each other's messages, and do not spin for a second after each.
# Who waits may miss a notice, and looks by itself soon.
shm_broadcast.SpinCondition.__init__.__defaults__ = (0.0,)
shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 20

for _module in (coordinator, utils, multiproc_executor):
    # For CPUs vLLM sets the method "spawn" by itself, and that would import all of it again.
    _module.get_mp_context = lambda: multiprocessing.get_context(
        os.environ.get("TESTS_START_METHOD", "fork")
    )


def _be_as_new() -> None:
    """As a process that was not forked: its server's signals and port are not its own."""
    signal.set_wakeup_fd(-1)
    plugins.plugins_loaded = False  # `baton.engines.vllm.engine_process` is one
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in Path("/proc/self/fd").iterdir():
        if _is_a_servers(int(entry.name)):
            os.dup2(nothing, int(entry.name), inheritable=False)  # its object here will close it
    os.close(nothing)


def _is_a_servers(fd: int) -> bool:
    """Whether it listens at a port, or is about to: vLLM binds its port first, and forks then."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
    except OSError:  # the one that lists the folder
        return False
    with socket.socket(fileno=os.dup(fd)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            copy.getpeername()
        except OSError:
            return bool(copy.getsockname()[1])
        return False


os.register_at_fork(after_in_child=_be_as_new)
