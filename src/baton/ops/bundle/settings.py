"""The configuration without secrets, and the texts on this machine that are known to be secret."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from baton.config.environment import state_directory
from baton.config.resolve import ENVIRONMENT_PREFIX, PATH_KEYS, Resolved, closed_keys, describe
from baton.ops.bundle.redaction import CUT, Redactor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_SECRET_FILE_BYTES: Final = 64 << 10

SHOWN_TEXTS: Final = PATH_KEYS | {
    "gateway.allowed_hosts",
    "gateway.allowed_origins",
    "kubernetes.context",
    "ray.address",
    "alerts.disabled",
    "alerts.runbook_url",
    "fleet.spread",
    "gateway.announce_host",
    "gateway.announce_url",
    "gateway.host",
    "gateway.management_host",
    "gateway.members",
    "gateway.mode",
    "gateway.move_streams",
    "gateway.decode",
    "gateway.peers",
    "gateway.prefill",
    "gateway.workers",
    "handoff.encoding",
    "handoff.verify_network",
    "handoff.verify_same_host",
    "handoff.verify_same_process",
    "log.format",
    "log.level",
    "preemption.source",
    "router.policy",
    "scaling.gateways",
    "scaling.model",
    "security.tls",
    "store.encoding",
    "store.tiers",
    "transfer.choice",
    "transfer.transports",
    "up.decode_engine_name",
    "up.prefill_engine_name",
    "worker.announce_to",
    "worker.announce_url",
    "worker.engine",
    "worker.handoff_host",
    "worker.host",
    "worker.name",
    "worker.role",
    "worker.served_model_name",
    "worker.topology",
}
"""Settings whose texts are shown; of URLs without user and query. Others: whether they are set."""

SHOWN_OPTIONS: Final = frozenset({"device", "directory", "dtype", "encoding", "eviction"})
"""Options of plug-ins whose texts are shown."""
QUANTITY: Final = re.compile(r"(num|max|min)_\w+|\w+_(s|bytes|tokens|blocks|share|size|ms)")
"""Names of options of plug-ins whose numbers are shown: a number may be a password, too."""

SECRET_VARIABLE: Final = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|SIGNATURE")
URL_DELIMITER: Final = re.compile(r"[/?&=#]")
SECRET_FILE: Final = re.compile(r"\w*(key|password|token|secret)_file|tls_key")
"""Settings that name files of secrets. Clients' keys are kept as digests, which are cut anyway."""
SHOWN_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
)


class ShownSetting(msgspec.Struct, frozen=True):
    """One setting, as `baton config show --json` has it."""

    value: object
    origin: str


class ShownSettings(msgspec.Struct, frozen=True):
    """`config.json`. `variables`: names of Baton's that are set, and values of harmless others."""

    settings: dict[str, ShownSetting]
    variables: dict[str, str]


def show_settings(
    resolved: Resolved, environment: Mapping[str, str], redactor: Redactor
) -> ShownSettings:
    """Each setting, where it came from, and its value if that cannot be a secret."""
    settings = {
        redactor.text(name): ShownSetting(
            _show(name, value.value, redactor), redactor.text(describe(value.origin))
        )
        for name, value in resolved.values.items()
    }
    variables = {
        name: environment[name] if name in SHOWN_VARIABLES else CUT
        for name in sorted(environment)
        if name in SHOWN_VARIABLES or name.startswith(ENVIRONMENT_PREFIX)
    }
    return ShownSettings(settings, {name: redactor.text(text) for name, text in variables.items()})


def find_secrets(resolved: Resolved, environment: Mapping[str, str]) -> set[str]:
    """Texts on this machine that must not be in an archive, wherever they turn up.

    Keys, values of variables whose names suggest a secret, and all texts of settings that are not
    shown, with the user and the password of their URLs.
    """
    secrets = {text for name, text in environment.items() if SECRET_VARIABLE.search(name.upper())}
    secrets.update(_words_of(state_directory(environment) / "cluster.key"))
    for name, value in resolved.values.items():
        texts = list(_texts(value.value))
        for text in texts:
            secrets |= _user_info(text)
            if SECRET_FILE.fullmatch(name.rpartition(".")[2]):
                secrets |= _words_of(Path(text))
        if not _may_show(name) and not _is_default(name, value.value):
            secrets.update(texts)
            for text in texts:
                secrets |= _secret_parts(text)
    # A key may be several, one in each line.
    return secrets | {word for text in secrets for word in text.split()}


def _show(name: str, value: object, redactor: Redactor) -> object:
    match value:
        case None | bool():
            return value
        case int() | float():
            return value if _may_show_number(name) else CUT
        case str():
            return redactor.text(value) if _may_show(name) else CUT
        case list() | tuple():
            if _may_show(name):
                return [redactor.text(str(each)) for each in value]
            return f"{CUT}: {len(value)} entries" if value else []
        case _:
            return CUT


def _may_show(name: str) -> bool:
    is_closed = name in closed_keys()
    return name in SHOWN_TEXTS if is_closed else name.rpartition(".")[2] in SHOWN_OPTIONS


def _may_show_number(name: str) -> bool:
    return name in closed_keys() or QUANTITY.fullmatch(name.rpartition(".")[2]) is not None


def _is_default(name: str, value: object) -> bool:
    return name in closed_keys() and closed_keys()[name].default == value


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list() | tuple():
            for each in value:
                yield from _texts(each)
        case dict():
            for each in value.values():
                yield from _texts(each)
        case _:
            return


def _user_info(text: str) -> set[str]:
    """User and password of a URL."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return set()
    return {part for part in (parts.password, parts.username) if part}


def _secret_parts(url: str) -> set[str]:
    """What follows the host of a URL: webhooks have their secrets there."""
    _, has_host, rest = url.partition("://")
    return set(URL_DELIMITER.split(rest)[1:]) if has_host else set()


def _words_of(path: Path) -> set[str]:
    """What a small file holds: keys, passwords."""
    try:
        path = path.expanduser()
        if not path.is_file() or path.stat().st_size > MAX_SECRET_FILE_BYTES:
            return set()
        return set(path.read_text("utf-8", errors="replace").split())
    except (OSError, RuntimeError):  # RuntimeError: the home of no user
        return set()
