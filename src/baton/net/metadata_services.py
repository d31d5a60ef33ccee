"""What the metadata services of clouds answer about the preemption of this machine.

Plain HTTP to a link-local address that only this machine reaches. `look` blocks for `TIMEOUT_S` a
request (GCP: `LONG_POLL_S` more), and returns when the machine is taken, None while it is not.
"""

from __future__ import annotations

import http.client
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from baton.errors import UNDECODABLE, PeerUnreachableError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.clock import Clock

TIMEOUT_S: Final = 5.0
LONG_POLL_S: Final = 20
MAX_ANSWER_BYTES: Final = 1 << 20
LEAST_NOTICE_S: Final = 10.0
MOST_NOTICE_S: Final = 600.0
"""A time outside these is the mistake of a clock: the machine's, most likely."""


class Preemption(NamedTuple):
    """The machine is taken in `in_s` seconds; `what` is the service's word for it."""

    in_s: float
    what: str


class _Answer(NamedTuple):
    status: int
    body: bytes
    etag: str


class MetadataService:
    """HTTP requests of one service."""

    def __init__(self, url: str) -> None:
        self._url, self._parts = url.rstrip("/"), urlsplit(url)

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S
    ) -> _Answer:
        """One request on a connection of its own.

        Raises:
            PeerUnreachableError: nothing answers at the address.
        """
        host = self._parts.hostname or ""
        connection = http.client.HTTPConnection(host, self._parts.port, timeout=timeout_s)
        with closing(connection):
            try:
                connection.request(method, path, headers=dict(headers))
                response = connection.getresponse()
                body = response.read(MAX_ANSWER_BYTES)
            except (OSError, http.client.HTTPException) as exc:
                raise PeerUnreachableError(
                    f"no metadata service answers at {self._url}: {exc}; is this machine one of "
                    "that cloud's? If not, change preemption.source"
                ) from exc
            return _Answer(response.status, body, response.headers.get("etag", ""))

    def fail(self, path: str, answer: _Answer) -> ProtocolError:
        """The error for an answer that is none of those documented."""
        return ProtocolError(
            f"the metadata service answered {answer.status} to {path}: {answer.body[:200]!r}"
        )


class _InstanceAction(msgspec.Struct, frozen=True):
    action: str
    time: str = ""


class AwsNotices:
    """EC2's instance metadata service, version 2: `spot/instance-action`, with a session token."""

    URL: Final = "http://169.254.169.254"
    TOKEN_PATH: Final = "/latest/api/token"  # noqa: S105 - a path
    PATH: Final = "/latest/meta-data/spot/instance-action"
    TOKEN_TTL_S: Final = 21_600

    def __init__(self, url: str | None, clock: Clock, notice_s: float) -> None:
        self._service, self._clock = MetadataService(url or self.URL), clock
        self._notice_s, self._token = notice_s, ""

    def look(self) -> Preemption | None:
        """Two minutes before the end it answers with action and time, until then with 404."""
        answer = self._get()
        if answer.status == HTTPStatus.UNAUTHORIZED:  # the token's time is over, or there is none
            self._token = self._fetch_token()
            answer = self._get()
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status != HTTPStatus.OK:
            raise self._service.fail(self.PATH, answer)
        try:
            found = msgspec.json.decode(answer.body, type=_InstanceAction)
            at = datetime.fromisoformat(found.time).timestamp() if found.time else None
        except (*UNDECODABLE, ValueError) as exc:
            raise self._service.fail(self.PATH, answer) from exc
        in_s = self._notice_s if at is None else at - self._clock.unix_now()
        return Preemption(_bounded(in_s), found.action)

    def _get(self) -> _Answer:
        return self._service.ask("GET", self.PATH, {"X-aws-ec2-metadata-token": self._token})

    def _fetch_token(self) -> str:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.TOKEN_TTL_S)}
        answer = self._service.ask("PUT", self.TOKEN_PATH, lifetime)
        token = answer.body.decode("ascii", "replace").strip()
        if answer.status != HTTPStatus.OK or not (token.isascii() and token.isprintable()):
            raise self._service.fail(self.TOKEN_PATH, answer)
        return token


class GcpNotices:
    """Compute Engine's metadata server: `instance/preempted`, which answers when it changes."""

    URL: Final = "http://metadata.google.internal"
    PATH: Final = "/computeMetadata/v1/instance/preempted"

    def __init__(self, url: str | None, notice_s: float) -> None:
        self._service, self._notice_s = MetadataService(url or self.URL), notice_s
        self._etag = ""

    def look(self) -> Preemption | None:
        """From the second time on it waits until the value changes, or `LONG_POLL_S`."""
        path, timeout_s = self.PATH, TIMEOUT_S
        if self._etag:
            timeout_s += LONG_POLL_S
            path += f"?wait_for_change=true&timeout_sec={LONG_POLL_S}&last_etag={self._etag}"
        answer = self._service.ask("GET", path, {"Metadata-Flavor": "Google"}, timeout_s)
        value = answer.body.strip().upper()
        if answer.status != HTTPStatus.OK or value not in {b"TRUE", b"FALSE"}:
            self._etag = ""
            raise self._service.fail(self.PATH, answer)
        self._etag = answer.etag if answer.etag.isascii() and answer.etag.isalnum() else ""
        return Preemption(self._notice_s, "preempted") if value == b"TRUE" else None


class _ScheduledEvent(msgspec.Struct, frozen=True, rename="pascal"):
    event_type: str
    resources: tuple[str, ...] = ()
    event_status: str = ""
    not_before: str = ""


class _ScheduledEvents(msgspec.Struct, frozen=True, rename="pascal"):
    events: tuple[_ScheduledEvent, ...]


class AzureNotices:
    """Azure's scheduled events: those of type Preempt that name this machine."""

    URL: Final = "http://169.254.169.254"
    NAME_PATH: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    PATH: Final = "/metadata/scheduledevents?api-version=2020-07-01"
    HEADERS: Final = {"Metadata": "true"}

    def __init__(self, url: str | None, clock: Clock, notice_s: float) -> None:
        self._service, self._clock = MetadataService(url or self.URL), clock
        self._notice_s, self._name = notice_s, ""

    def look(self) -> Preemption | None:
        """The events of a scale set go to all its machines: only this one's count."""
        if not self._name:
            named = self._service.ask("GET", self.NAME_PATH, self.HEADERS)
            if named.status != HTTPStatus.OK or not named.body.strip():
                raise self._service.fail(self.NAME_PATH, named)
            self._name = named.body.decode(errors="replace").strip()
        answer = self._service.ask("GET", self.PATH, self.HEADERS)
        if answer.status != HTTPStatus.OK:
            raise self._service.fail(self.PATH, answer)
        try:
            events = msgspec.json.decode(answer.body, type=_ScheduledEvents).events
            found = [self._read(event) for event in events if self._is_own(event)]
        except (*UNDECODABLE, ValueError) as exc:
            raise self._service.fail(self.PATH, answer) from exc
        return min(found, default=None)

    def _is_own(self, event: _ScheduledEvent) -> bool:
        return event.event_type == "Preempt" and self._name in event.resources

    def _read(self, event: _ScheduledEvent) -> Preemption:
        """The time is left out once the event has started."""
        in_s = self._notice_s
        if event.not_before:
            at = parsedate_to_datetime(event.not_before).replace(tzinfo=UTC).timestamp()
            in_s = at - self._clock.unix_now()
        return Preemption(_bounded(in_s), f"{event.event_type}, {event.event_status}")


def _bounded(in_s: float) -> float:
    return min(MOST_NOTICE_S, max(LEAST_NOTICE_S, in_s))
