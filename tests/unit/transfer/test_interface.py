"""What a transport has to implement, and how the rest of it is found."""

import inspect
from dataclasses import dataclass

import pytest

from baton.errors import ConfigError, TransferError
from baton.transfer.interface import (
    Capabilities,
    Transport,
    as_reader,
    as_viewer,
    choose_memory,
)


def claim(**claims):
    return Capabilities(memory=("host",), same_host_only=False, **claims)


@dataclass
class Writer:
    capabilities: Capabilities
    kind: str = "pigeon"


class Both(Writer):
    def read(self, read): ...

    def view(self, remote, array): ...


def test_a_transport_has_nine_methods():
    methods = {name for name, _ in inspect.getmembers(Transport, inspect.isfunction)}
    assert {name for name in methods if not name.startswith("_")} == {
        "attach",
        "close",
        "close_grant",
        "detach",
        "expose",
        "finish_grant",
        "open_grant",
        "poll",
        "submit",
    }


def test_who_claims_reads_and_views_is_used_for_them():
    transport = Both(claim(reads=True, views=True))
    assert as_reader(transport) is transport
    assert as_viewer(transport) is transport


@pytest.mark.parametrize(
    "transport",
    [Writer(claim()), Writer(claim(reads=True, views=True)), Both(claim())],
    ids=["neither", "claim without method", "method without claim"],
)
def test_a_claim_and_a_method_are_needed(transport):
    with pytest.raises(TransferError, match="pigeon does not read a peer's pages"):
        as_reader(transport)
    with pytest.raises(TransferError, match="pigeon does not show a peer's pages in place"):
        as_viewer(transport)


def test_a_refusal_names_what_is_possible():
    with pytest.raises(TransferError, match="; read them"):
        as_viewer(Writer(claim(reads=True)))
    with pytest.raises(TransferError, match="; ask the peer to write them"):
        as_viewer(Writer(claim()))


def move(*memory, same_host_only=True):
    capabilities = Capabilities(memory=memory, same_host_only=same_host_only)
    return Writer(capabilities, kind="-".join(memory))


def test_kv_is_where_all_transports_reach_it():
    assert choose_memory(()) == "shared"
    assert choose_memory((move("host", "shared"), move("shared"))) == "shared"
    assert choose_memory((move("cuda"), move("cuda", "shared"))) == "cuda"
    with pytest.raises(ConfigError, match="host-shared: host, shared; cuda: cuda"):
        choose_memory((move("host", "shared"), move("cuda")))


def test_a_gpus_memory_does_not_leave_its_host():
    """Its digests have no key: who is on the way could change what they are of."""
    with pytest.raises(ConfigError, match="its digests have no key"):
        choose_memory((move("cuda"), move("cuda", same_host_only=False)))
