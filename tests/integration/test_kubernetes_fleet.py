"""`baton status`, `scale`, `drain`, `upgrade`, `down`, `logs` of a release on Kubernetes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from baton.errors import BatonError
from baton.launch.errors import FleetError
from baton.launch.fleet import FleetSize, find_backend
from baton.launch.kubernetes import api as api_module
from baton.launch.kubernetes import fleet as fleet_module
from baton.launch.kubernetes import waiting as waiting_module
from tests.integration.gateway_cluster import until_true
from tests.integration.kubernetes_api import refuse

pytest.importorskip("kubernetes_validate")
from tests.integration.kubernetes_cluster import KubernetesCluster, is_ready, rfc3339

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from aiohttp import web

    from baton.launch.fleet import FleetControl

RENDERED = Path(__file__).parents[2] / "deploy" / "kubernetes"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of tests are short."""
    monkeypatch.setattr(waiting_module, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(fleet_module, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(fleet_module, "CONFLICT_WAIT_S", 0.01)
    monkeypatch.setattr(fleet_module, "EVICT_AGAIN_S", 0.02)
    for module in (waiting_module, fleet_module):
        monkeypatch.setattr(module, "AWAY_S", 0.5)


@functools.cache
def objects(name: str = "small") -> list[dict]:
    text = (RENDERED / f"{name}.yaml").read_text(encoding="utf-8")
    return [found for found in yaml.load_all(text, yaml.CSafeLoader) if found]


@contextlib.asynccontextmanager
async def controlled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    chart: str = "small",
    fleet: str = "baton",
    decode: int = 1,
    **user: str,
) -> AsyncGenerator[tuple[KubernetesCluster, FleetControl]]:
    """A cluster whose pods are ready, and control of its release."""
    cluster = KubernetesCluster(tmp_path, objects(chart))
    if decode != 1:
        cluster.set_size("baton-decode", decode)
    cluster.settle()
    async with asyncio.timeout(30), cluster.running():
        file = cluster.write_kubeconfig(tmp_path / "config", **user)
        monkeypatch.setenv("KUBECONFIG", str(file))
        async with find_backend("kubernetes").connect(fleet) as control:
            yield cluster, control


async def read(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


async def each(lines: AsyncIterator[str], take: Callable[[str], object]) -> None:
    async for line in lines:
        take(line)


async def until(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await until_true(holds)


def test_status_shows_every_pod_and_what_is_wrong(tmp_path, monkeypatch):
    async def main():
        async with controlled(tmp_path, monkeypatch, decode=3) as (cluster, control):
            found = await control.status()
            assert (found.fleet, found.backend, found.version) == (
                "baton/baton",
                "kubernetes",
                "0.1.0",
            )
            assert [each.role for each in found.members] == ["gateway", *["decode"] * 3, "prefill"]
            assert {each.state for each in found.members} == {"ready"}
            decode = found.members[1]
            assert decode.name == "baton-decode-0"
            assert decode.url == f"https://{cluster.pods[decode.name]['status']['podIP']}:8101"
            assert decode.host.startswith("node-")
            assert 59 < decode.up_s < 100
            assert decode.labels == {"pool": "decode"}
            assert found.members[0].url.startswith("http://")

            cluster.failing["baton-decode-1"] = "ImagePullBackOff"
            cluster.pods["baton-decode-2"]["status"]["conditions"][0]["status"] = "False"
            cluster.ready_s = cluster.end_s = 1e6
            cluster._end(cluster.pods["baton-prefill-0"])
            await until(lambda: not is_ready(cluster.pods["baton-decode-1"]))
            members = {each.name: each for each in (await control.status()).members}
            assert members["baton-decode-1"].state == "failed"
            assert "ImagePullBackOff" in members["baton-decode-1"].reason
            assert members["baton-decode-2"].state == "failed"
            assert "readiness probe" in members["baton-decode-2"].reason
            assert members["baton-prefill-0"].state == "draining"
            monkeypatch.setattr(cluster, "_make_pod", lambda *_: None)  # a quota
            cluster.set_size("baton-decode", 4)
            missing = (await control.status()).members[4]
            assert (missing.name, missing.state) == ("baton-decode-3", "starting")
            assert "quota" in missing.reason

    asyncio.run(main())


def test_a_role_grows_and_shrinks(tmp_path, monkeypatch):
    async def main():
        async with controlled(tmp_path, monkeypatch) as (cluster, control):
            uids = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
            lines = await read(control.scale(FleetSize(decode=3)))
            assert lines[0] == "baton-decode-1, baton-decode-2: starting"
            assert any(line.startswith("baton-decode-2: ready at https://") for line in lines)
            assert lines[-1] == "serving: 3 decode, 1 prefill"
            assert is_ready(cluster.pods["baton-decode-2"])
            lines = await read(control.scale(FleetSize(prefill=2, decode=1)))
            drained = lines.index("baton-decode-1, baton-decode-2: draining")
            ready = next(n for n, line in enumerate(lines) if "baton-prefill-1: ready" in line)
            assert ready < drained < lines.index("baton-decode-2: ended")
            assert set(cluster.pods) == {*uids, "baton-prefill-1"}
            assert all(cluster.pods[name]["metadata"]["uid"] == uid for name, uid in uids.items())
            assert await read(control.scale(FleetSize(decode=1))) == [
                "serving: 1 decode, 2 prefill"
            ]
            for size, said in (
                (FleetSize(decode=0), "no worker would be left"),
                (FleetSize(both=1), "--workers does not fit this fleet"),
                (FleetSize(), "how many workers are wanted"),
            ):
                with pytest.raises(FleetError, match=said):
                    await read(control.scale(size))
            assert cluster.size("baton-decode") == 1

    asyncio.run(main())


def test_racks_of_a_role_stay_even_and_pods_without_an_identity_are_refused(tmp_path, monkeypatch):
    async def main():
        async with controlled(tmp_path, monkeypatch, chart="vllm-many") as (cluster, control):
            await read(control.scale(FleetSize(decode=7)))
            racks = ["baton-decode-r1", "baton-decode-r2"]
            assert [cluster.size(name) for name in racks] == [4, 3]
            with pytest.raises(FleetError, match=r"no identity for baton-decode-r1-4.*maxReplicas"):
                await read(control.scale(FleetSize(decode=9)))
            assert [cluster.size(name) for name in racks] == [4, 3]
            await read(control.scale(FleetSize(decode=2)))
            assert [cluster.size(name) for name in racks] == [1, 1]
            member = (await control.status()).members[-1]
            assert member.labels == {"pool": "prefill", "rack": "r2"}

    asyncio.run(main())


def test_a_pod_that_does_not_start_is_reported_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting_module, "FAILED_S", 0.2)

    async def main():
        async with controlled(tmp_path, monkeypatch) as (cluster, control):
            cluster.failing["baton-decode-1"] = "ErrImagePull"
            lines = []
            with pytest.raises(FleetError, match=r"baton-decode-1: ErrImagePull.*baton scale"):
                await each(control.scale(FleetSize(decode=2)), lines.append)
            assert "baton-decode-1: ErrImagePull: back-off" in lines
            await read(control.scale(FleetSize(decode=1)))
            assert "baton-decode-1" not in cluster.pods
            cluster.failing.clear()
            cluster.ready_s = 1e6
            monkeypatch.setattr(waiting_module, "PLACE_S", 0.2)
            with pytest.raises(FleetError, match="baton-decode-1: it is starting"):
                await read(control.scale(FleetSize(decode=2)))

    asyncio.run(main())


def test_a_change_of_another_client_is_never_overwritten(tmp_path, monkeypatch):
    async def main():
        async with controlled(tmp_path, monkeypatch) as (cluster, control):
            conflicts = 0

            def status_changes(verb: str, resource: str) -> None:
                nonlocal conflicts
                if resource == "statefulsets/scale" and conflicts < 2:
                    conflicts += 1
                    cluster._touch(cluster.workloads["baton-decode"])

            cluster.fault = status_changes
            await read(control.scale(FleetSize(decode=2)))
            assert (conflicts, cluster.num_asked["patch statefulsets/scale"]) == (2, 3)

            def another_scales(verb: str, resource: str) -> None:
                if resource == "statefulsets/scale":
                    cluster.set_size("baton-decode", 5)

            cluster.fault = another_scales
            with pytest.raises(FleetError, match="from 2 to 5 replicas meanwhile"):
                await read(control.scale(FleetSize(decode=3)))
            assert cluster.size("baton-decode") == 5

    asyncio.run(main())


def test_a_drained_worker_is_evicted_when_the_budget_allows_it(tmp_path, monkeypatch):
    async def main():
        async with controlled(tmp_path, monkeypatch, decode=2) as (cluster, control):
            cluster.budget = 0
            uid = cluster.pods["baton-decode-0"]["metadata"]["uid"]
            draining = asyncio.create_task(read(control.drain("baton-decode-0")))
            await until(lambda: cluster.num_asked["create pods/eviction"] >= 3)
            assert cluster.pods["baton-decode-0"]["metadata"]["uid"] == uid
            cluster.budget = 1
            lines = await draining
            assert "violate the disruption budget" in lines[0]
            assert lines[1:3] == ["baton-decode-0: draining", "baton-decode-0: ended"]
            await until(lambda: is_ready(cluster.pods["baton-decode-0"]))
            assert cluster.pods["baton-decode-0"]["metadata"]["uid"] != uid
            assert cluster.size("baton-decode") == 2
            gateway = next(name for name in cluster.pods if "gateway" in name)
            for name, said in (
                ("baton-decode-7", "there is no worker 'baton-decode-7'; there are baton-decode-0"),
                (gateway, "last gateway"),
            ):
                with pytest.raises(FleetError, match=said):
                    await read(control.drain(name))
            cluster.failing["baton-decode-1"] = "CrashLoopBackOff"
            await until(lambda: not is_ready(cluster.pods["baton-decode-1"]))
            with pytest.raises(FleetError, match="last worker that generates answers"):
                await read(control.drain("baton-decode-0"))

    asyncio.run(main())


def test_an_upgrade_replaces_every_pod_one_after_the_other(tmp_path, monkeypatch):
    async def main():
        async with controlled(tmp_path, monkeypatch, decode=3) as (cluster, control):
            before = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
            cluster.least_decoding = 3
            lines = await read(control.upgrade())
            after = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
            assert len(after) == len(before) == 5
            assert not before & after
            assert cluster.least_decoding == 2
            assert "baton-decode: all 3 replaced" in lines
            gateway = lines.index("baton-gateway: all 1 replaced")
            assert gateway > lines.index("baton-prefill: all 1 replaced")
            assert lines[-1].startswith("every process was replaced")
            await read(control.scale(FleetSize(decode=1)))
            with pytest.raises(FleetError, match="one worker that generates answers"):
                await read(control.upgrade())

    asyncio.run(main())


def test_the_only_worker_that_is_ready_is_neither_upgraded_nor_taken_out(tmp_path, monkeypatch):
    async def main():
        async with controlled(tmp_path, monkeypatch, decode=2) as (cluster, control):
            cluster.failing["baton-decode-0"] = "CrashLoopBackOff"
            await until(lambda: not is_ready(cluster.pods["baton-decode-0"]))
            with pytest.raises(FleetError, match="answers and is ready, baton-decode-1, and a"):
                await read(control.upgrade())
            assert cluster.num_asked["patch statefulsets"] == 0
            with pytest.raises(FleetError, match="baton-decode-1 would go, as a StatefulSet"):
                await read(control.scale(FleetSize(decode=1)))
            assert cluster.size("baton-decode") == 2
            assert is_ready(cluster.pods["baton-decode-1"])
            cluster.failing["baton-decode-1"] = cluster.failing.pop("baton-decode-0")
            await until(lambda: is_ready(cluster.pods["baton-decode-0"]))
            await until(lambda: not is_ready(cluster.pods["baton-decode-1"]))
            await read(control.scale(FleetSize(decode=1)))
            assert is_ready(cluster.pods["baton-decode-0"])

    asyncio.run(main())


def test_an_upgrade_that_is_stuck_names_what_is_in_its_way(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting_module, "FAILED_S", 0.2)

    async def main():
        async with controlled(tmp_path, monkeypatch, decode=2) as (cluster, control):
            cluster.failing["baton-decode-1"] = "ImagePullBackOff"
            cluster.end_s = 0.0
            image = {"spec": {"containers": [{"name": "worker", "image": "of helm upgrade"}]}}
            cluster._change(cluster.workloads["baton-decode"], template=image)
            steps = []
            with pytest.raises(
                FleetError, match=r"stopped at baton-decode.*ImagePullBackOff.*undo"
            ):
                await each(control.upgrade(), steps.append)
            assert steps[0] == "a rollout of baton-decode is under way"
            assert cluster.num_asked["patch statefulsets"] == 0  # it was followed
            assert is_ready(cluster.pods["baton-decode-0"])
            cluster.failing.clear()
            lines = await read(control.upgrade())
            assert lines[-1] == "baton-decode: all 2 replaced"

    asyncio.run(main())


def test_down_ends_gateways_first_and_only_a_release_that_was_named(tmp_path, monkeypatch):
    async def main():
        async with controlled(tmp_path, monkeypatch, fleet="default") as (cluster, control):
            with pytest.raises(FleetError, match="--fleet baton/baton"):
                await read(control.down())
            assert len(cluster.pods) == 3
            async with find_backend("kubernetes").connect("baton/baton") as named:
                lines = await read(named.down())
            assert cluster.pods == {}
            gateway = next(
                n for n, line in enumerate(lines) if "gateway" in line and "ended" in line
            )
            assert gateway < lines.index("baton-decode-0: draining")
            assert "helm -n baton uninstall baton" in lines[-1]
            found = await control.status()
            assert (found.members, found.version) == ((), "0.1.0")

    asyncio.run(main())


def test_logs_are_followed_over_the_end_of_a_container(tmp_path, monkeypatch):
    async def main():
        async with controlled(tmp_path, monkeypatch) as (cluster, control):
            name = "baton-decode-0"
            cluster.logs[name] = [f"{rfc3339(1000 + n)} line {n}" for n in range(5)]
            assert await read(control.logs(name, 2, follow=False)) == ["line 3", "line 4"]
            assert await read(control.logs(name, 0, follow=False)) == []
            seen: list[str] = []

            lines = control.logs(name, 1, follow=True)
            following = asyncio.create_task(each(lines, seen.append))
            await until(lambda: seen == ["line 4"])
            cluster.logs[name] += [f"{rfc3339(1004.5)} line 5", ""]  # in the same second
            await until(lambda: cluster.num_asked["get pods/log"] >= 4)
            cluster.logs[name] += [f"{rfc3339(1006)} line 6", f"{rfc3339(1006)} at the same time"]
            await until(lambda: len(seen) == 4)
            assert seen == ["line 4", "line 5", "line 6", "at the same time"]
            cluster.fault = lambda *_: refuse(400, "container is waiting to start")
            cluster.logs[name].append("")
            with pytest.raises(FleetError, match="waiting to start"):
                await following
            cluster.fault = lambda *_: None
            with pytest.raises(FleetError, match="no process 'x'; there are baton-decode-0"):
                await read(control.logs("x", 1, follow=False))

    asyncio.run(main())


@pytest.mark.parametrize("is_lost", [False, True])
def test_logs_of_a_pod_that_writes_nothing_are_followed(tmp_path, monkeypatch, is_lost):
    """Longer than one request takes at most, or after its connection is lost."""
    monkeypatch.setattr(api_module, "FOLLOW_S", 60.0 if is_lost else 1.0)

    async def main():
        async with controlled(tmp_path, monkeypatch) as (cluster, control):
            name = "baton-decode-0"
            cluster.logs[name] = [f"{rfc3339(1000)} line 0"]
            seen: list[str] = []

            following = asyncio.create_task(each(control.logs(name, 1, follow=True), seen.append))
            await until(lambda: seen == ["line 0"])
            if is_lost:
                await asyncio.sleep(2 * fleet_module.AWAY_S)
                cluster.logs[name].append("lost")
            await until(lambda: cluster.num_asked["get pods/log"] > 1)
            assert not following.done()
            cluster.logs[name].append(f"{rfc3339(1009)} line 1")
            await until(lambda: seen == ["line 0", "line 1"])
            following.cancel()

    asyncio.run(main())


def test_an_api_server_that_is_away_for_a_moment_costs_nothing_and_for_long_an_error(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(waiting_module, "AWAY_S", 1.0)

    async def main():
        cluster = KubernetesCluster(tmp_path, objects())
        cluster.settle()
        async with asyncio.timeout(60):
            async with contextlib.AsyncExitStack() as stack:
                running = await stack.enter_async_context(contextlib.AsyncExitStack())
                await running.enter_async_context(cluster.running())
                file = cluster.write_kubeconfig(tmp_path / "config")
                monkeypatch.setenv("KUBECONFIG", str(file))
                control = await stack.enter_async_context(
                    find_backend("kubernetes").connect("baton")
                )
                cluster.ready_s = 1e6
                seen: list[str] = []

                lines = control.scale(FleetSize(decode=2))
                scaling = asyncio.create_task(each(lines, seen.append))
                await until(lambda: bool(seen))
                await running.aclose()
                await asyncio.sleep(0.2)
                assert not scaling.done()
                cluster.ready_s = 0.0
                async with cluster.running():
                    await scaling
                    assert seen[-1] == "serving: 2 decode, 1 prefill"
                    cluster.ready_s = 1e6
                    lines = control.scale(FleetSize(decode=3))
                    scaling = asyncio.create_task(each(lines, seen.append))
                    await until(lambda: "baton-decode-2: starting" in seen)
                with pytest.raises(FleetError, match=r"goes on without this command.*baton status"):
                    await scaling
                with pytest.raises(FleetError, match="context test, namespace baton: https://127"):
                    await control.status()
                async with find_backend("kubernetes").connect("baton"):
                    raise AssertionError

    with pytest.raises(FleetError, match="Connect call failed"):
        asyncio.run(main())


def refuses(code: int, message: str, resource: str, **headers: str):
    num = 0

    def fault(_: str, asked: str) -> web.StreamResponse | None:
        nonlocal num
        if asked != resource or (code == 429 and num == 1):
            return None
        num += 1
        answer = refuse(code, message)
        answer.headers.update(headers)
        return answer

    return fault


def test_refusals_are_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(api_module, "BUSY_TIMEOUT_S", 2.5)

    async def main():
        async with controlled(tmp_path, monkeypatch) as (cluster, control):
            cluster.fault = refuses(403, "User x cannot patch", "statefulsets/scale")
            with pytest.raises(FleetError, match=r"verb patch on statefulsets/scale\.apps"):
                await read(control.scale(FleetSize(decode=2)))
            cluster.fault = refuses(404, "not found", "statefulsets/scale")
            with pytest.raises(FleetError, match="HTTP 404 to patch"):
                await read(control.scale(FleetSize(decode=2)))
            cluster.fault = refuses(429, "too many requests", "pods", **{"retry-after": "1"})
            before = cluster.num_asked["list pods"]
            assert len((await control.status()).members) == 3
            assert cluster.num_asked["list pods"] == before + 2
            cluster.fault = refuses(503, "starting", "pods", **{"retry-after": "9"})
            with pytest.raises(FleetError, match="HTTP 503 to list pods"):
                await control.status()
            cluster.fault = lambda *_: None
            del cluster.tokens["admin"]
            with pytest.raises(FleetError, match="the kubeconfig's user u was refused"):
                await control.status()

    asyncio.run(main())


def test_the_charts_role_suffices_for_autoscale_and_for_nothing_else(tmp_path, monkeypatch):
    chart = objects("vllm-many")
    (role,) = (
        each
        for each in chart
        if (each["kind"], each["metadata"]["name"]) == ("Role", "baton-autoscale")
    )

    async def main():
        async with controlled(tmp_path, monkeypatch, chart="vllm-many") as (cluster, _):
            cluster.tokens["autoscaler"] = role["rules"]
            file = cluster.write_kubeconfig(tmp_path / "config", token="autoscaler")
            monkeypatch.setenv("KUBECONFIG", str(file))
            async with find_backend("kubernetes").connect("baton") as control:
                assert len((await control.status()).members) > 3
                await read(control.scale(FleetSize(decode=6)))
                assert cluster.size("baton-decode-r1") == 3
                await read(control.scale(FleetSize(decode=4)))
                for refused in (control.upgrade(), control.drain("baton-decode-r1-0")):
                    with pytest.raises(FleetError, match="it needs a Role with the verb"):
                        await read(refused)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        ("other", "no release 'other' .* there: baton"),
        ("elsewhere/baton", "HTTP 404"),
        ("a/b/c", r"\[NAMESPACE/\]RELEASE"),
    ],
)
def test_a_release_that_is_not_there(tmp_path, monkeypatch, fleet, said):
    async def main():
        async with controlled(tmp_path, monkeypatch, fleet=fleet):
            pass

    with pytest.raises(BatonError, match=said):
        asyncio.run(main())


def test_the_command_prints_the_table_of_other_fleets(tmp_path):
    async def main():
        cluster = KubernetesCluster(tmp_path, objects())
        cluster.settle()
        async with cluster.running():
            file = cluster.write_kubeconfig(tmp_path / "config")
            command = [sys.executable, "-m", "baton.cli", "status", "--on", "kubernetes"]
            environment = {"KUBECONFIG": str(file), "PATH": ""}
            done = await asyncio.to_thread(
                subprocess.run,
                [*command, "--json"],
                env=environment,
                capture_output=True,
                check=False,
                timeout=60,
            )
            return done, json.loads(done.stdout)

    done, found = asyncio.run(main())
    assert (done.returncode, done.stderr) == (0, b"")
    assert [each["state"] for each in found["members"]] == ["ready"] * 3
