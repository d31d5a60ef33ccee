"""Runs deploy/kubernetes/small.yaml without a cluster: each container's command as a process.

`python -m tests.deploy.pods_as_processes` (root, Linux, util-linux, iproute2; a minute). As in the
pods: user 10001, no capabilities, a read-only root filesystem, the containers' variables, files of
Secrets that root owns, addresses of pods (in a network namespace). A server that speaks the API's
list and watch stands for the cluster. The decode worker is replaced under load; exits with 1 if a
request failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import aiohttp
import yaml

from scripts.render_chart import RENDERED, ROOT
from tests.deploy.manifests import POD_FIELDS, Workload, environment_of, find, workloads
from tests.integration.kubernetes_api import KubernetesApi, endpoint

INSIDE: Final = "--inside"
NAMESPACES: Final = """
set -e
ip link set lo up
for number in 10 11 12 13; do ip addr add 10.1.0.$number/32 dev lo; done
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
START_S: Final = 90.0
CLIENTS: Final = 4
PROMPT: Final = {
    "model": "demo",
    "prompt": "It was a long way home, and the road went through a dark wood. " * 4,
    "max_tokens": 64,
    "temperature": 0,
}


class Pods:
    """The processes, and the API server that lists them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        text = (RENDERED / "small.yaml").read_text(encoding="utf-8")
        self._objects = [found for found in yaml.safe_load_all(text) if found]
        self._workloads = {found.name: found for found in workloads(self._objects)}
        self.api = KubernetesApi(directory)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, workload: str, pod: str, address: str, **variables: str) -> None:
        """One more pod of a workload."""
        found = self._workloads[workload]
        root = self._mount(found, pod)
        POD_FIELDS.update({"metadata.name": pod, "status.podIP": address})
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
            **environment_of(found, root),
            **variables,
        }
        drop = ("--clear-groups", "--no-new-privs", "--bounding-set", "-all")
        command = ["setpriv", "--reuid", str(USER), "--regid", str(USER), *drop]
        with (self._directory / f"{pod}.log").open("wb") as log:
            self.processes[pod] = subprocess.Popen(
                [*command, *found.container["command"]], env=environment, stdout=log, stderr=log
            )

    def end(self) -> None:
        """End what runs still, and print the last of each log."""
        for pod, process in self.processes.items():
            process.kill()
            process.wait()
            print(f"== {pod}\n{(self._directory / f'{pod}.log').read_text()[-1500:]}")

    def _mount(self, workload: Workload, pod: str) -> Path:
        root = self._directory / pod
        (root / "config").mkdir(parents=True)
        (root / "cluster").mkdir()
        volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
        (found,) = find(self._objects, "ConfigMap", volumes["config"]["configMap"]["name"])
        (root / "config" / "baton.toml").write_text(found["data"]["baton.toml"])
        key = root / "cluster" / "key"
        key.write_text("ab" * 32, encoding="ascii")
        os.chown(key, 0, USER)
        key.chmod(volumes["cluster-key"]["secret"]["defaultMode"])
        return root


async def until_200(client: aiohttp.ClientSession, url: str) -> None:
    """Until an address answers so."""
    began = time.monotonic()
    while True:
        try:
            async with client.get(url) as response:
                if response.status == 200:
                    print(f"{time.monotonic() - began:.1f} s: {url}")
                    return
        except aiohttp.ClientError:
            pass
        if time.monotonic() - began > START_S:
            raise TimeoutError(url)
        await asyncio.sleep(0.2)


async def keep_asking(client: aiohttp.ClientSession, stop: asyncio.Event, seen: list[int]) -> None:
    """Requests one after the other; their statuses."""
    while not stop.is_set():
        try:
            url = "http://10.1.0.10:8000/v1/completions"
            async with client.post(url, json=PROMPT) as response:
                await response.read()
                seen.append(response.status)
        except aiohttp.ClientError:
            seen.append(0)


async def run(pods: Pods) -> int:
    """Start all, replace the decode worker under load, end all."""
    api = pods.api
    async with api.running(), aiohttp.ClientSession() as client:
        account = Path("/run/secrets/kubernetes.io/serviceaccount")
        account.mkdir(parents=True)
        for file in api.account.iterdir():
            (account / file.name).write_bytes(file.read_bytes())
        server = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(api.port),
        }
        pods.start("Deployment/baton-gateway", "baton-gateway-x", "10.1.0.10", **server)
        pods.start("StatefulSet/baton-prefill", "baton-prefill-0", "10.1.0.11")
        pods.start("StatefulSet/baton-decode", "baton-decode-0", "10.1.0.12")
        for role, address in (("prefill", "10.1.0.11"), ("decode", "10.1.0.12")):
            await until_200(client, f"http://{address}:8109/ready")
            api.put(f"{role}-a", endpoint(address), service=f"baton-{role}")
        await until_200(client, "http://10.1.0.10:9000/ready")
        stop, seen = asyncio.Event(), list[int]()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(keep_asking(client, stop, seen))
            pods.start("StatefulSet/baton-decode", "baton-decode-1", "10.1.0.13")
            await until_200(client, "http://10.1.0.13:8109/ready")
            api.put("decode-b", endpoint("10.1.0.13"), service="baton-decode")
            await asyncio.sleep(3)
            ending = endpoint("10.1.0.12", ready=False, serving=True, terminating=True)
            api.put("decode-a", ending, service="baton-decode")
            await asyncio.sleep(1)  # preStop, shortened
            old = pods.processes["baton-decode-0"]
            old.send_signal(signal.SIGTERM)
            print("the old decode worker ended:", await asyncio.to_thread(old.wait, 60))
            api.remove("decode-a")
            await asyncio.sleep(3)
            stop.set()
        async with client.get("http://10.1.0.10:9000/debug/requests") as response:
            listed = (await response.json())["requests"]
        print("modes:", sorted({request["mode"] for request in listed}))
        failed = [status for status in seen if status != 200]
        print(f"{len(seen)} requests, {len(failed)} failed {failed}")
        return 1 if failed or not seen else 0


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
    pods = Pods(directory)
    try:
        return asyncio.run(asyncio.wait_for(run(pods), 170))
    finally:
        pods.end()


if __name__ == "__main__":
    sys.exit(main())
