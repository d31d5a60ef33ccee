"""How a log that is followed ends: with its connection it may, otherwise it failed."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest

from baton.launch.kubernetes.api import FleetApi, KubernetesFleetError
from baton.launch.kubernetes.objects import Pod
from baton.net.kubernetes import connection
from baton.net.kubernetes.access import KubernetesApiError

POD = msgspec.convert(
    {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [{"name": "c"}]}}, Pod
)


def follow(error):
    """The lines of a log that ends with this error."""

    async def iter_any():
        yield b"t line\n"
        raise error from ValueError("why")

    @asynccontextmanager
    async def ask(*_):
        yield SimpleNamespace(content=SimpleNamespace(iter_any=iter_any))

    async def read():
        return [line async for line in api.read_log(POD, None, None, follow=True)]

    api = FleetApi(SimpleNamespace(access=None, name="here"), "ns", None)
    api._connection = SimpleNamespace(ask=ask)
    return asyncio.run(read())


def test_what_came_over_a_connection_that_did_not_end_is_a_failure():
    with pytest.raises(KubernetesFleetError, match="a line of more than"):
        follow(KubernetesApiError("a line of more than so many bytes"))


def test_the_end_of_a_connection_ends_the_lines():
    assert follow(connection.ApiConnectionError("reset")) == [b"t line"]
