"""Debian's chromium without a window, driven over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

BINARY = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(BINARY is None, reason="no chromium: apt-get install chromium")
START_S = 30.0
CALL_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root, and open nothing but 127.0.0.1
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)


class Page:
    """One tab. `problems`: uncaught errors, what the console got as an error, refused content."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self.problems: list[str] = []
        self.requested: list[str] = []
        self.num_prompts = 0
        self._password = ""

    async def read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                answer = self._answers.pop(event["id"], None)
                if answer is not None and not answer.done():
                    answer.set_result(event)
                continue
            params = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    details = params["exceptionDetails"]
                    self.problems.append(str(details.get("exception", details)))
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    self.problems.append(f"{params['entry']['text']} {params['entry'].get('url')}")
                case "Fetch.requestPaused":
                    await self._send("Fetch.continueRequest", requestId=params["requestId"])
                case "Fetch.authRequired":
                    self.num_prompts += 1
                    answer = {"response": "ProvideCredentials", "password": self._password}
                    await self._send(
                        "Fetch.continueWithAuth",
                        requestId=params["requestId"],
                        authChallengeResponse=answer,
                    )
                case "Network.requestWillBeSent":
                    self.requested.append(params["request"]["url"])

    async def answer_prompts(self, password: str) -> None:
        """What a person does when the browser asks for a name and a password."""
        self._password = password
        await self.call("Fetch.enable", handleAuthRequests=True)

    async def _send(self, method: str, **params: Any) -> asyncio.Future[Any]:
        self._num_calls += 1
        answer = self._answers[self._num_calls] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._num_calls, "method": method, "params": params})
        return answer

    async def call(self, method: str, **params: Any) -> Any:
        event = await asyncio.wait_for(await self._send(method, **params), CALL_S)
        assert "error" not in event, (method, event["error"])
        return event["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        result = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str, within_s: float = 20.0) -> None:
        """Wait for an expression to be true."""
        ends_at = time.monotonic() + within_s
        while not await self.run(f"Boolean({script})"):
            assert time.monotonic() < ends_at, (script, self.problems)
            await asyncio.sleep(0.05)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def use_scheme(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def press(self, key: str) -> None:
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **(text if kind == "keyDown" else {}),
            )

    async def heap_bytes(self) -> int:
        """What JavaScript holds after a collection of garbage."""
        for _ in range(3):
            await self.call("HeapProfiler.collectGarbage")
        return (await self.call("Runtime.getHeapUsage"))["usedSize"]

    async def screenshot(self, path: Path, *, is_whole: bool = False) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def chromium(*flags: str) -> AsyncGenerator[Page]:
    """A browser with one empty tab; it ends with the block."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(BINARY, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=1 << 20,
        )
        try:
            async with asyncio.timeout(START_S):
                port = await _read_port(process)
            draining = asyncio.create_task(_drain(process))
            async with aiohttp.ClientSession() as client:
                url = await _find_tab(client, port)
                async with client.ws_connect(url, max_msg_size=1 << 28) as socket:
                    page = Page(socket)
                    reading = asyncio.create_task(page.read())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    yield page
                    reading.cancel()
            draining.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _read_port(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        if found := re.search(rb"ws://127\.0\.0\.1:(\d+)/", line):
            return found[1].decode()
    raise AssertionError("chromium ended before it listened")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.read(1 << 16):
        pass


async def _find_tab(client: aiohttp.ClientSession, port: str) -> str:
    while True:
        async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
        if tabs:
            return tabs[0]["webSocketDebuggerUrl"]
        await asyncio.sleep(0.05)
