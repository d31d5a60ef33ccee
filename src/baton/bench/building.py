"""A contender's name → the contender. Only what is built is imported: some libraries are heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from baton.bench.contender import Contender, Surroundings
    from baton.bench.orders import Begin


def build_contender(begin: Begin, around: Surroundings) -> Contender:
    """Build what the order names.

    Raises:
        ConfigError: there is no such thing, its library is not installed, or its options are wrong.
        TransferError: it does not work here.
    """
    if begin.kind == "transport":
        from baton.bench.over_transport import OverTransport  # noqa: PLC0415

        return OverTransport(begin.name, begin.options, around)
    build = _BUILDERS.get(begin.name)
    if build is None:
        raise ConfigError(f"there is nothing called {begin.name!r} to measure here")
    return build(around)


def _memcpy(around: Surroundings) -> Contender:
    from baton.bench.copying import OneCopy  # noqa: PLC0415

    return OneCopy(around)


def _tuned_socket(around: Surroundings) -> Contender:
    from baton.bench.sockets import PlainSocket  # noqa: PLC0415

    return PlainSocket(around, is_tuned=True)


def _socket(around: Surroundings) -> Contender:
    from baton.bench.sockets import PlainSocket  # noqa: PLC0415

    return PlainSocket(around, is_tuned=False)


def _nixl(around: Surroundings) -> Contender:
    from baton.bench.peers.nixl import Nixl  # noqa: PLC0415

    return Nixl(around, is_tcp=False)


def _nixl_tcp(around: Surroundings) -> Contender:
    from baton.bench.peers.nixl import Nixl  # noqa: PLC0415

    return Nixl(around, is_tcp=True)


def _mooncake(around: Surroundings) -> Contender:
    from baton.bench.peers.mooncake import Mooncake  # noqa: PLC0415

    return Mooncake(around)


def _gloo(around: Surroundings) -> Contender:
    from baton.bench.peers.gloo import Gloo  # noqa: PLC0415

    return Gloo(around)


def _pickle(around: Surroundings) -> Contender:
    from baton.bench.peers.serialised import Pickle, Serialised  # noqa: PLC0415

    return Serialised(Pickle(), around)


def _torch_save(around: Surroundings) -> Contender:
    from baton.bench.peers.serialised import Serialised, TorchSave  # noqa: PLC0415

    return Serialised(TorchSave(), around)


def _iperf(around: Surroundings) -> Contender:
    from baton.bench.peers.iperf import Iperf  # noqa: PLC0415

    return Iperf(around, num_streams=1)


def _iperf_of_two(around: Surroundings) -> Contender:
    from baton.bench.peers.iperf import Iperf  # noqa: PLC0415

    return Iperf(around, num_streams=2)


_BUILDERS: Final[Mapping[str, Callable[[Surroundings], Contender]]] = {
    "memcpy": _memcpy,
    "tuned socket": _tuned_socket,
    "NIXL": _nixl,
    "NIXL (TCP)": _nixl_tcp,
    "Mooncake": _mooncake,
    "gloo": _gloo,
    "socket": _socket,
    "pickle": _pickle,
    "torch.save": _torch_save,
    "iperf3": _iperf,
    "iperf3 -P 2": _iperf_of_two,
}
