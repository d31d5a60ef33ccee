"""Runs deploy/kubernetes/small.yaml without a cluster, and Baton's commands on it under load.

`python -m tests.deploy.pods_as_processes` (root, Linux, util-linux, iproute2; three minutes). Each
container's command is a process: as in pods, with user 10001, no capabilities, a read-only root
filesystem, the containers' variables, files of Secrets that root owns, addresses of pods (in a
network namespace). Servers that speak the API, with controllers, stand for the cluster
(`tests.integration.kubernetes_cluster`). `baton scale`, `drain`, `upgrade`, `logs`, `down` are run
as an operator runs them; exits with 1 if one of them, or a request meanwhile, failed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from scripts.render_chart import RENDERED, ROOT
from tests.deploy.manifests import POD_FIELDS, Workload, environment_of, find, workloads
from tests.integration.kubernetes_api import KubernetesApi, endpoint
from tests.integration.kubernetes_cluster import (
    KubernetesCluster,
    is_ready,
    label,
    mark_ready,
    rfc3339,
)

INSIDE: Final = "--inside"
NAMESPACES: Final = """
set -e
ip link set lo up
for number in $(seq 10 60); do ip addr add 10.1.0.$number/32 dev lo; done
mount -t tmpfs tmpfs /mnt
mkdir -p "/mnt/tmp$ROOT" /mnt/python
mount --bind "$ROOT" "/mnt/tmp$ROOT"
mount --bind "$PYTHON" /mnt/python
mount -t tmpfs -o mode=755 tmpfs /root
mkdir -p "$PYTHON"
mount --bind /mnt/python "$PYTHON"
mount -t tmpfs tmpfs /run
case "$ROOT" in /tmp/*) mount --rbind /mnt/tmp/tmp /tmp;; *) mount -t tmpfs tmpfs /tmp;; esac
chmod 1777 /tmp
mount -o remount,bind,ro /
cd "$ROOT"
exec "$@"
"""
USER: Final = 10001
LOOK_S: Final = 0.1
PRE_STOP_S: Final = 1.0
"""From "terminating" to SIGTERM: shorter than the chart's."""
MIN_READY_S: Final = 2.0
"""From a probe that succeeds to a pod that counts as available: minReadySeconds, shortened."""
COMMANDS: Final = (
    "status",
    "scale --decode 2",
    "drain baton-decode-0",
    "upgrade",
    "logs baton-decode-1 -n 3",
    "scale --decode 1",
)
CLIENTS: Final = 4
PROMPT: Final = {
    "model": "demo",
    "prompt": "It was a long way home, and the road went through a dark wood. " * 4,
    "max_tokens": 64,
    "temperature": 0,
}


class Process:
    """One life of a pod."""

    def __init__(self, popen: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self.popen, self.address, self.log = popen, address, log
        self.serving_at: float | None = None
        self.ends_at: float | None = None
        self.num_logged = 0


class Kubelet:
    """Starts a process for each pod of the cluster, probes it, and ends it when its pod must end.

    `api` lists the workers' addresses for gateways, as the controller of EndpointSlices does.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        text = (RENDERED / "small.yaml").read_text(encoding="utf-8")
        self._objects = [found for found in yaml.load_all(text, yaml.CSafeLoader) if found]
        self._workloads = {
            found.labels["app.kubernetes.io/component"] + found.labels.get("baton/pool", ""): found
            for found in workloads(self._objects)
        }
        self.cluster = KubernetesCluster(directory, self._objects)
        self.cluster.ready_s = self.cluster.end_s = float("inf")
        (directory / "slices").mkdir()
        self.api = KubernetesApi(directory / "slices")
        self._processes: dict[str, Process] = {}
        self._slices: dict[str, list[object]] = {}

    @property
    def gateways(self) -> list[str]:
        """Addresses of gateways that are ready."""
        pods = self.cluster.pods.values()
        return [
            pod["status"]["podIP"]
            for pod in pods
            if is_ready(pod) and label(pod, "app.kubernetes.io/component") == "gateway"
        ]

    async def run(self) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(2)) as client:
            while True:
                for pod in list(self.cluster.pods.values()):
                    await self._sync(pod, client)
                self._list_workers()
                await asyncio.sleep(LOOK_S)

    def end(self) -> None:
        """End what runs still."""
        for process in self._processes.values():
            process.popen.kill()
            process.popen.wait()

    async def _sync(self, pod: dict[str, Any], client: aiohttp.ClientSession) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        process = self._processes.get(uid)
        if process is None:
            process = self._processes[uid] = self._start(pod)
        lines = process.log.read_text(errors="replace").splitlines()
        stamped = [f"{rfc3339(time.time())} {line}" for line in lines[process.num_logged :]]
        self.cluster.logs.setdefault(name, []).extend(stamped)
        process.num_logged = len(lines)
        now = time.time()
        if process.popen.poll() is not None:
            if "deletionTimestamp" not in pod["metadata"]:
                raise RuntimeError(f"{name} ended: {process.log.read_text()[-1500:]}")
            print(f"    {name} ended: {process.popen.returncode}")
            del self.cluster.pods[name]
        elif "deletionTimestamp" in pod["metadata"]:
            if process.ends_at is None:
                process.ends_at = now + PRE_STOP_S
            elif process.ends_at <= now:
                process.ends_at = float("inf")
                process.popen.send_signal(signal.SIGTERM)
        elif process.serving_at is None:
            port = 9000 if label(pod, "app.kubernetes.io/component") == "gateway" else 8109
            if await is_200(client, f"http://{process.address}:{port}/ready"):
                process.serving_at = now
        elif not is_ready(pod) and now - process.serving_at > MIN_READY_S:
            mark_ready(pod, "node-7", process.address, process.serving_at)

    def _start(self, pod: dict[str, Any]) -> Process:
        number, name = 10 + len(self._processes), pod["metadata"]["name"]
        address, root = f"10.1.0.{number}", self._directory / f"{name}-{number}"
        component = label(pod, "app.kubernetes.io/component") + label(pod, "baton/pool")
        workload = self._workloads[component]
        self._mount(workload, root)
        POD_FIELDS.update({"metadata.name": name, "status.podIP": address})
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self.api.port),
            # All pods are in one network namespace here.
            **{k: v.replace("0.0.0.0", address) for k, v in environment_of(workload, root).items()},
        }
        drop = ("--clear-groups", "--no-new-privs", "--bounding-set", "-all")
        command = ["setpriv", "--reuid", str(USER), "--regid", str(USER), *drop]
        with (root / "log").open("wb") as log:
            popen = subprocess.Popen(
                [*command, *workload.container["command"]], env=environment, stdout=log, stderr=log
            )
        return Process(popen, address, root / "log")

    def _mount(self, workload: Workload, root: Path) -> None:
        (root / "config").mkdir(parents=True)
        (root / "cluster").mkdir()
        volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
        (found,) = find(self._objects, "ConfigMap", volumes["config"]["configMap"]["name"])
        (root / "config" / "baton.toml").write_text(found["data"]["baton.toml"])
        key = root / "cluster" / "key"
        key.write_text("ab" * 32, encoding="ascii")
        os.chown(key, 0, USER)
        key.chmod(volumes["cluster-key"]["secret"]["defaultMode"])

    def _list_workers(self) -> None:
        for pool in ("prefill", "decode"):
            listed = []
            for pod in self.cluster.pods.values():
                process = self._processes.get(pod["metadata"]["uid"])
                if label(pod, "baton/pool") != pool or process is None:
                    continue
                ends, serves = (
                    "deletionTimestamp" in pod["metadata"],
                    process.serving_at is not None,
                )
                listed.append(
                    endpoint(
                        process.address, ready=serves and not ends, serving=serves, terminating=ends
                    )
                )
            if self._slices.get(pool) != listed:
                self._slices[pool] = listed
                self.api.put(f"{pool}-a", *listed, service=f"baton-{pool}")


async def is_200(client: aiohttp.ClientSession, url: str) -> bool:
    """Whether an address answers so."""
    try:
        async with client.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def keep_asking(
    client: aiohttp.ClientSession, kubelet: Kubelet, stop: asyncio.Event, seen: list[str]
) -> None:
    """Requests one after the other, each on a new connection to a ready gateway; what failed."""
    while not stop.is_set():
        try:
            url = f"http://{random.choice(kubelet.gateways)}:8000/v1/completions"
            async with client.post(url, json=PROMPT) as response:
                body = await response.text()
                seen.append("" if response.status == 200 else f"{response.status} {body[:300]}")
        except aiohttp.ClientError as exc:
            seen.append(repr(exc))


async def run_command(arguments: str, kubeconfig: Path) -> int:
    """As an operator runs it: its exit code."""
    print(f"$ baton {arguments} --on kubernetes", flush=True)
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", *arguments.split(), "--on", "kubernetes"),
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
    )
    code = await process.wait()
    print(f"    exit code {code} after {time.monotonic() - began:.1f} s", flush=True)
    return code


async def run(kubelet: Kubelet, directory: Path) -> int:
    """Start all, run the commands under load, end all."""
    cluster = kubelet.cluster
    async with kubelet.api.running(), cluster.running(), asyncio.TaskGroup() as tasks:
        account = Path("/run/secrets/kubernetes.io/serviceaccount")
        account.mkdir(parents=True)
        for file in kubelet.api.account.iterdir():
            (account / file.name).write_bytes(file.read_bytes())
        kubeconfig = cluster.write_kubeconfig(directory / "config")
        running = tasks.create_task(kubelet.run())  # if it fails, everything ends
        while not (cluster.pods and all(map(is_ready, cluster.pods.values()))):
            await asyncio.sleep(LOOK_S)
        seen, codes = await run_under_load(kubelet, kubeconfig)
        codes.append(await run_command("down --fleet baton/baton", kubeconfig))
        left = list(cluster.pods)
        running.cancel()
    failed = [each for each in seen if each]
    print(f"{len(seen)} requests, {len(failed)} failed {failed[:5]}; left after down: {left}")
    return 1 if failed or not seen or any(codes) or left else 0


async def run_under_load(kubelet: Kubelet, kubeconfig: Path) -> tuple[list[str], list[int]]:
    """Run the commands: how each request ended (empty: well), and the commands' exit codes."""
    seen, codes, stop = list[str](), list[int](), asyncio.Event()
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as client, asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(keep_asking(client, kubelet, stop, seen))
        for arguments in COMMANDS:
            before = len(seen)
            codes.append(await run_command(arguments, kubeconfig))
            failed = sum(map(bool, seen[before:]))
            print(f"    {len(seen) - before} requests meanwhile, {failed} failed", flush=True)
        stop.set()
    return seen, codes


def main() -> int:
    if INSIDE not in sys.argv:
        environment = {**os.environ, "ROOT": str(ROOT), "PYTHON": sys.base_prefix}
        shell = ["unshare", "-m", "-n", "--propagation", "private", "sh", "-c", NAMESPACES, "sh"]
        inside = [sys.executable, "-m", "tests.deploy.pods_as_processes", INSIDE]
        return subprocess.run([*shell, *inside], env=environment, check=False).returncode
    directory = Path("/tmp/pods")
    directory.mkdir(mode=0o755)
    home = Path("/tmp/home")
    home.mkdir()
    os.chown(home, USER, USER)
    kubelet = Kubelet(directory)
    try:
        return asyncio.run(asyncio.wait_for(run(kubelet, directory), 175))
    finally:
        kubelet.end()


if __name__ == "__main__":
    sys.exit(main())
