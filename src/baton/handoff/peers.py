"""The peers of one agent: which are linked, their Hello messages, and their liveness.

Owns the listener and all links. The agent's loop calls `serve` for a ready socket and `tick` now
and then; what happened is returned, never called back.

`negotiate`: whether two workers can exchange KV, and through which of their KV views. KV goes from
the listener (prefill) to the dialer (decode); the dialer's preference counts first.
"""

from __future__ import annotations

import logging
import selectors
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.clock import Clock, Instant
from baton.encodings.interface import RAW
from baton.errors import (
    AuthenticationError,
    BatonError,
    ConfigError,
    LayoutMismatchError,
    PeerLostError,
    PeerUnreachableError,
    ProtocolError,
)
from baton.handoff.encoded_view import LOSSY_TRAIT, encoding_of
from baton.handoff.io_backend import OS_BACKEND, IoBackend, NonBlockingSocket
from baton.handoff.link import Link, LinkPhase
from baton.handoff.messages import (
    PROTOCOL_VERSION,
    AddressedMessage,
    Hello,
    HelloRefused,
    Message,
    Ping,
    Pong,
    UnsupportedHello,
)
from baton.kv.layout import find_differences
from baton.net.endpoints import OUT_OF_RESOURCES
from baton.record import Record
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from baton.auth.credentials import Credentials
    from baton.auth.ticket import WorkerRef
    from baton.handoff.messages import KVViewDescriptor
    from baton.ids import Epoch, WorkerId

MAX_REASONS: Final = 64
MAX_REASON_CHARS: Final = 2000


@dataclass(frozen=True, slots=True)
class ViewPair:
    """Which view of either side: indices into the `views` of their Hellos."""

    dialer: int
    listener: int


@dataclass(frozen=True, slots=True)
class NegotiatedViews:
    """The pair as one side sees it: `ours` is an index into its own views."""

    ours: int
    theirs: KVViewDescriptor


def choose_views(
    dialer: Sequence[KVViewDescriptor],
    listener: Sequence[KVViewDescriptor],
    encoding: str = RAW,
) -> ViewPair | None:
    """The first pair of views in one encoding, in the dialer's order, that can exchange KV.

    Both are digested in one way.
    """
    for mine, destination in enumerate(dialer):
        for theirs, source in enumerate(listener):
            if not encoding_of(source.layout) == encoding_of(destination.layout) == encoding:
                continue
            if source.digest == destination.digest and not find_differences(
                source.layout, destination.layout
            ):
                return ViewPair(mine, theirs)
    return None


def find_encoded_views(dialer: Hello, listener: Hello) -> dict[str, ViewPair]:
    """By encoding: the views through which two workers that were negotiated exchange encoded KV."""
    names = dict.fromkeys(encoding_of(view.layout) for view in dialer.views)
    pairs = {
        name: choose_views(dialer.views, listener.views, name) for name in names if name != RAW
    }
    return {name: pair for name, pair in pairs.items() if pair is not None}


def negotiate(dialer: Hello, listener: Hello) -> ViewPair:
    """The KV views through which two workers exchange raw KV: all who exchange any can do that.

    Raises:
        LayoutMismatchError: they cannot; with the reason, and each trait in which they differ.
    """
    names = f"on {dialer.worker}", f"on {listener.worker}"
    if dialer.version != listener.version:
        versions = f"{dialer.version} {names[0]}, {listener.version} {names[1]}"
        raise LayoutMismatchError((f"handoff protocol: {versions}",))
    traits = _explain_traits(dialer, listener)
    if dialer.fingerprint != listener.fingerprint:
        prints = f"{dialer.fingerprint[:16]}… {names[0]}, {listener.fingerprint[:16]}… {names[1]}"
        raise _refusal([f"another model: fingerprint {prints}", *traits])
    _check_exactness(dialer, listener)
    pair = choose_views(dialer.views, listener.views)
    if pair is None:
        raise _refusal([*_explain_views(dialer.views, listener.views), *traits])
    return pair


def _check_exactness(dialer: Hello, listener: Hello) -> None:
    """Refuse KV that may have lost something to an encoding which its receiver does not use.

    Raises:
        LayoutMismatchError: it may.
    """
    held, accepted = (
        set(hello.traits.get(LOSSY_TRAIT, "").split(",")) - {""} for hello in (listener, dialer)
    )
    if held - accepted:
        names = ", ".join(sorted(held - accepted))
        reason = (
            f"KV of {listener.worker} may have been encoded as {names}, which {dialer.worker} does "
            "not use: give both the same store.encoding and handoff.encoding"
        )
        raise _refusal([reason])


def _refusal(reasons: Iterable[str]) -> LayoutMismatchError:
    lines = [reason[:MAX_REASON_CHARS] for reason in reasons]
    return LayoutMismatchError(tuple(lines[:MAX_REASONS]))


def _explain_views(
    dialer: Sequence[KVViewDescriptor], listener: Sequence[KVViewDescriptor]
) -> Iterator[str]:
    """What keeps each pair apart; "source" is the listener."""
    is_one_pair = len(dialer) == len(listener) == 1
    for mine, destination in enumerate(dialer):
        for theirs, source in enumerate(listener):
            if encoding_of(source.layout) != RAW or encoding_of(destination.layout) != RAW:
                continue
            pair = "" if is_one_pair else f"view {theirs} into view {mine}: "
            if source.digest != destination.digest:
                yield (
                    f"{pair}digests: {source.digest} of the source, {destination.digest} of the "
                    "destination (sum128: KV in a GPU's memory, xxh3: in the host's); give both "
                    "workers the same transfer.transports"
                )
            for difference in find_differences(source.layout, destination.layout):
                yield pair + difference


def _explain_traits(dialer: Hello, listener: Hello) -> list[str]:
    ours, theirs = dialer.traits, listener.traits
    return [
        f"{name}: {ours.get(name, 'not given')} on {dialer.worker}, "
        f"{theirs.get(name, 'not given')} on {listener.worker}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


logger = logging.getLogger(__name__)

MAX_LINKS: Final = 1024
MAX_UNPROVED: Final = 128
"""Places for those that dialed and have not proved the key: they take none of the others'."""
MAX_WARNINGS: Final = 256
"""Texts of which each is logged as a warning once; with more, the oldest again."""
NUM_ROUND_TRIPS: Final = 8
"""The shortest of the latest ones shows a peer's clock (NTP's clock filter): clocks drift."""
AUTHENTICATION_TIMEOUT_S: Final = 2.0
_READ_WRITE: Final = selectors.EVENT_READ | selectors.EVENT_WRITE
ACCEPT_PAUSE_S: Final = 0.5
"""Where no descriptor is left: a listener that stays readable would spin."""
EVERY_INTERFACE: Final = frozenset({"", "0.0.0.0", "::", "[::]"})  # noqa: S104 - refused


@dataclass(eq=False, slots=True)
class Peer:
    """The other end of one link. `hello` and `negotiated_views` are None before its Hello.

    `negotiated_views` are for raw KV, `encoded_views` for KV in each encoding that both have.
    `interest` is what the selector waits for on its socket. `distance` is that of the latest
    handoff's ticket. `shares_clock`: its Hello names this host, which nothing proves.

    KV goes to the side that dialed: from a peer that was `dialed` here, to one that dialed.
    """

    link: Link
    dialed: WorkerRef | None
    hello: Hello | None = None
    shares_clock: bool = False
    negotiated_views: NegotiatedViews | None = None
    encoded_views: dict[str, NegotiatedViews] = field(default_factory=dict)
    pinged_at: float = 0.0
    interest: int = 0
    distance: str = ""
    clock_offset_s: float = 0.0
    _round_trips: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=NUM_ROUND_TRIPS)
    )

    @property
    def name(self) -> str:
        """For logs and errors."""
        if self.hello is not None:
            return self.hello.worker
        return self.dialed.worker if self.dialed else "an unknown peer"

    @property
    def negotiated(self) -> NegotiatedViews:
        """The views through which raw KV goes."""
        if self.negotiated_views is None:
            raise AssertionError(f"{self.name} has sent no Hello")
        return self.negotiated_views

    def views_for(self, encoding: str) -> NegotiatedViews:
        """The views through which KV in an encoding goes.

        Raises:
            ProtocolError: the two have no views in common for it.
        """
        if encoding == RAW:
            return self.negotiated
        if encoding not in self.encoded_views:
            raise ProtocolError(f"no views for KV encoded as {encoding} in common with {self.name}")
        return self.encoded_views[encoding]

    def to_local(self, at: float) -> float:
        """An instant on the peer's clock, on ours."""
        return at - self.clock_offset_s

    def measure_clock(self, sent_at: float, theirs: float, now: float) -> None:
        """Between two instants on our clock the peer's showed `theirs`."""
        if sent_at <= now:
            self._round_trips.append((now - sent_at, theirs - (sent_at + now) / 2))
            self.clock_offset_s = min(self._round_trips)[1]


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer sent its Hello and can exchange KV with this worker."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The link to a peer ended, or never came up."""

    peer: Peer
    error: BatonError


class MessageReceived(Record, frozen=True):
    """A peer that is up sent a message about a handoff."""

    peer: Peer
    message: AddressedMessage


PeerEvent: TypeAlias = PeerUp | PeerGone | MessageReceived


class PeerTable:
    """All links of one agent. Owner: the agent's thread."""

    def __init__(
        self,
        hello: Hello,
        *,
        credentials: Credentials,
        clock: Clock,
        selector: selectors.BaseSelector,
        liveness_timeout_s: float,
        io_backend: IoBackend = OS_BACKEND,
    ) -> None:
        self._hello = hello
        self._credentials, self._clock, self._selector = credentials, clock, selector
        self._liveness_timeout_s = liveness_timeout_s
        self._io_backend = io_backend
        self._listener: NonBlockingSocket | None = None
        self._peers: dict[Peer, None] = {}  # in order, so that a simulation repeats itself
        self._dialed: dict[tuple[WorkerId, Epoch], Peer] = {}
        self.unflushed: dict[Peer, None] = {}
        """Links over which something was sent since the last `flush`."""
        self._ended: list[PeerGone] = []
        self._warned: dict[str, None] = {}  # the oldest first
        self._unproved: dict[Peer, None] = {}  # of those that dialed; the oldest first
        self._accepts_at: Instant | None = None  # set while accepting is paused
        self._log = LimitedLog(logger, clock)
        self._num_readings = credentials.number
        self._ticked_at = clock.now()

    @property
    def epoch(self) -> Epoch:
        """This worker's own."""
        return self._hello.epoch

    def __iter__(self) -> Iterator[Peer]:
        """Every peer with an open link."""
        return iter(tuple(self._peers))

    def listen(self, host: str, port: int) -> str:
        """Accept links on `host:port` (port 0: any); the address that peers dial.

        Raises:
            ConfigError: the address cannot be bound, or peers could not dial it.
        """
        if host in EVERY_INTERFACE:
            raise ConfigError(
                f"peers cannot dial {host!r}, which means every interface; set [worker] "
                "handoff_host to the address of this host that they reach"
            )
        try:
            listener = self._io_backend.listen(host, port)
        except OSError as exc:
            raise ConfigError(
                f"cannot listen for handoffs on {host}:{port}: {exc.strerror}; "
                "choose another [worker] handoff_port (0 takes any free one)"
            ) from exc
        self._selector.register(listener, selectors.EVENT_READ, self)
        self._listener = listener
        bound = listener.getsockname()
        return f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"

    def dial(self, ref: WorkerRef) -> Peer | None:
        """The link to one incarnation of a worker, made now if there is none; it may not be up yet.

        None if the address makes no sense or refuses at once. What goes wrong later follows as a
        `PeerGone`.
        """
        known = self._dialed.get((ref.worker, ref.epoch))
        if known is not None:
            return known
        try:
            link = Link.dial(ref.address, self._credentials, self._clock.now(), self._io_backend)
        except BatonError as exc:
            logger.warning("handoff: %s", exc)
            return None
        peer = Peer(link, dialed=ref)
        link.send(self._hello)
        self._dialed[ref.worker, ref.epoch] = peer
        self._admit(peer)
        return peer

    def serve(self, source: Peer | PeerTable, mask: int) -> list[PeerEvent]:
        """A registered socket is ready: what came of it."""
        if isinstance(source, PeerTable):
            self._accept()
            return []
        return self._serve_peer(source, mask)

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message with the next `flush`."""
        if peer.link.phase is LinkPhase.CLOSED:
            return
        try:
            peer.link.send(message)
        except BatonError as exc:
            self._drop(peer, exc)
            return
        if peer.link.phase is LinkPhase.UP:  # else the end of the handshake sends it
            self.unflushed[peer] = None

    def flush(self) -> None:
        """Send what was queued since the last call, all of a peer's at once.

        A link that breaks over it is reported by the next `tick`.
        """
        while self.unflushed:
            peer, _ = self.unflushed.popitem()
            try:
                peer.link.flush()
            except BatonError as exc:
                self._drop(peer, exc)
            else:
                self._update_interest(peer)

    def tick(self) -> list[PeerEvent]:
        """Ping, and give up on peers that were silent for too long before the last call.

        What came until then has been read: what came since may not have, if a step took long.
        """
        now = self._clock.now()
        if self._accepts_at is not None and now >= self._accepts_at:
            self._resume_accepting()
        for peer in tuple(self._unproved):
            if now - peer.link.opened_at > AUTHENTICATION_TIMEOUT_S:
                text = f"it has not proved the cluster key within {AUTHENTICATION_TIMEOUT_S:g} s"
                self._drop(peer, PeerLostError(text))
        self._drop_revoked()
        for peer in self:
            silent_s = self._ticked_at - peer.link.received_at
            limit_s = self._liveness_timeout_s if peer.hello else AUTHENTICATION_TIMEOUT_S
            if silent_s > limit_s:
                self._drop(peer, PeerLostError(f"{peer.name} was silent for {silent_s:.1f} s"))
        self._ticked_at = now
        self._ping_where_due(now)
        ended, self._ended = self._ended, []
        return list(ended)

    def keep_alive(self) -> None:
        """Ping and flush, where the last `tick` was long ago.

        Called within steps that may take seconds: peers would take this worker for lost. A link
        that breaks over it is reported by the next `tick`.
        """
        now = self._clock.now()
        if now - self._ticked_at > self._liveness_timeout_s / 4:
            self._ping_where_due(now)
            self.flush()

    def _drop_revoked(self) -> None:
        number = self._credentials.number
        if number == self._num_readings:
            return
        self._num_readings = number
        for peer in self:
            certified = peer.link.peer
            if certified is not None and self._credentials.is_revoked(certified):
                self._drop(peer, AuthenticationError(f"the certificate of {certified} was revoked"))

    def end(self, peer: Peer, error: BatonError) -> None:
        """End the link to a peer; the next `tick` reports it."""
        self._drop(peer, error)

    def close(self) -> None:
        """Send what is queued; close the listener and every link."""
        self.flush()
        if self._listener is not None:
            if self._accepts_at is None:
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for peer in self:
            self._drop(peer, PeerLostError("this worker is stopping"))
        self._ended.clear()

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            if exc.errno in OUT_OF_RESOURCES:
                self._pause_accepting(exc)
            return  # or it left again before it was accepted
        if len(self._peers) - len(self._unproved) >= MAX_LINKS:
            self._log.warning("links", f"refused a peer: {MAX_LINKS} are linked")
            sock.close()
            return
        if len(self._unproved) >= MAX_UNPROVED:
            self._drop_oldest_unproved(f"{MAX_UNPROVED} others have not proved the key either")
        peer = Peer(Link.accept(sock, self._credentials, self._clock.now()), dialed=None)
        self._unproved[peer] = None
        self._admit(peer)

    def _pause_accepting(self, exc: OSError) -> None:
        if self._listener is None or self._accepts_at is not None:
            return
        self._log.warning("accept", f"handoff: no peer can be accepted: {exc.strerror}")
        self._selector.unregister(self._listener)
        self._accepts_at = Instant(self._clock.now() + ACCEPT_PAUSE_S)
        self._drop_oldest_unproved("no file descriptor is left")

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            self._accepts_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self)

    def _drop_oldest_unproved(self, reason: str) -> None:
        oldest = next(iter(self._unproved), None)
        if oldest is not None:
            self._drop(oldest, PeerLostError(reason))

    def _admit(self, peer: Peer) -> None:
        self._peers[peer] = None
        peer.interest = _READ_WRITE if peer.link.unsent else selectors.EVENT_READ
        self._selector.register(peer.link.sock, peer.interest, peer)

    def _serve_peer(self, peer: Peer, mask: int) -> list[PeerEvent]:
        if peer not in self._peers:
            return []
        events: list[PeerEvent] = []
        try:
            if mask & selectors.EVENT_WRITE:
                peer.link.flush()
            if mask & selectors.EVENT_READ:
                messages = peer.link.receive(self._clock.now())
                if peer.link.phase is LinkPhase.UP:
                    self._unproved.pop(peer, None)
                for message in messages:
                    events += self._handle(peer, message)
        except BatonError as exc:
            self._drop(peer, exc)
        else:
            self._update_interest(peer)
        ended, self._ended = self._ended, []
        return [*events, *ended]

    def _handle(self, peer: Peer, message: Message) -> list[PeerEvent]:
        match message:
            case Hello():
                return self._negotiate(peer, message)
            case UnsupportedHello(version, worker):
                reason = (
                    f"handoff protocol: version {version} on {worker}, "
                    f"{PROTOCOL_VERSION} on {self._hello.worker}"
                )
                self.send(peer, HelloRefused((reason,)))
                raise LayoutMismatchError((reason,))
            case HelloRefused(reasons):
                raise LayoutMismatchError(reasons)
            case Ping(at):
                self.send(peer, Pong(at, self._clock.now()))
                return []
            case Pong(echo, at):
                if not peer.shares_clock:
                    peer.measure_clock(echo, at, self._clock.now())
                return []
            case _ if peer.hello is None:
                raise ProtocolError(f"{type(message).__name__} before Hello")
            case _:
                return [MessageReceived(peer, message)]

    def _negotiate(self, peer: Peer, hello: Hello) -> list[PeerEvent]:
        if peer.hello is not None:
            raise ProtocolError("a second Hello")
        certified = peer.link.peer
        if certified is None or not certified.may_be(hello.worker):
            raise AuthenticationError(f"{certified} calls itself {hello.worker}")
        try:
            peer.negotiated_views = self._find_views(peer, hello)
            peer.encoded_views = self._find_encoded_views(peer, hello)
        except LayoutMismatchError as exc:
            self.send(peer, HelloRefused(exc.differences))
            raise
        peer.hello = hello
        peer.shares_clock = hello.clock_domain == self._hello.clock_domain
        if peer.dialed is None:
            self.send(peer, self._hello)
        # Before anything else is sent: the answer then comes before the first stamps to be shifted.
        self._ping(peer)
        return [PeerUp(peer)]

    def _ping_where_due(self, now: Instant) -> None:
        for peer in self:
            if peer.hello and now - peer.pinged_at > self._liveness_timeout_s / 4:
                self._ping(peer)

    def _ping(self, peer: Peer) -> None:
        peer.pinged_at = self._clock.now()
        self.send(peer, Ping(peer.pinged_at))

    def _find_views(self, peer: Peer, hello: Hello) -> NegotiatedViews:
        if peer.dialed is None:
            pair = negotiate(dialer=hello, listener=self._hello)
            return NegotiatedViews(pair.listener, hello.views[pair.dialer])
        pair = negotiate(dialer=self._hello, listener=hello)
        if peer.dialed.worker != hello.worker:
            raise PeerLostError(f"{hello.worker} answers in place of {peer.dialed.worker}")
        if peer.dialed.epoch != hello.epoch:
            raise PeerLostError(f"{hello.worker} restarted: another epoch answers")
        return NegotiatedViews(pair.dialer, hello.views[pair.listener])

    def _find_encoded_views(self, peer: Peer, hello: Hello) -> dict[str, NegotiatedViews]:
        if peer.dialed is None:
            pairs = find_encoded_views(dialer=hello, listener=self._hello)
            return {
                name: NegotiatedViews(pair.listener, hello.views[pair.dialer])
                for name, pair in pairs.items()
            }
        pairs = find_encoded_views(dialer=self._hello, listener=hello)
        return {
            name: NegotiatedViews(pair.dialer, hello.views[pair.listener])
            for name, pair in pairs.items()
        }

    def _update_interest(self, peer: Peer) -> None:
        interest = _READ_WRITE if peer.link.unsent else selectors.EVENT_READ
        if interest != peer.interest and peer in self._peers:
            peer.interest = interest
            self._selector.modify(peer.link.sock, interest, peer)

    def _drop(self, peer: Peer, error: BatonError) -> None:
        if peer not in self._peers:
            return
        del self._peers[peer]
        if peer in self.unflushed:
            del self.unflushed[peer]
            with suppress(BatonError):  # such as what it was refused for
                peer.link.flush()
        level = self._level_of(peer, error)
        if peer in self._unproved:
            del self._unproved[peer]
            self._log.warning("unauthenticated", f"handoff: a connection was closed: {error}")
        self._selector.unregister(peer.link.sock)
        peer.link.close()
        if peer.dialed is not None:
            self._dialed.pop((peer.dialed.worker, peer.dialed.epoch), None)
        logger.log(level, "handoff: link to %s ended: %s", peer.name, error)
        self._ended.append(PeerGone(peer, error))

    def _level_of(self, peer: Peer, error: BatonError) -> int:
        """Peers come and go; one that cannot be talked to is the operator's business, once."""
        if peer in self._unproved:  # logged by `_drop`, once in a while
            return logging.DEBUG
        if isinstance(error, PeerLostError | PeerUnreachableError):
            return logging.INFO
        text = str(error)
        if text in self._warned:
            return logging.DEBUG
        if len(self._warned) >= MAX_WARNINGS:
            del self._warned[next(iter(self._warned))]
        self._warned[text] = None
        return logging.WARNING
