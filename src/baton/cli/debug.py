"""`baton debug`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from baton.cli.flags import ConfigFlags, Fleet
from baton.config.cluster_key import KEY_VARIABLE
from baton.config.environment import read_environment, state_directory
from baton.errors import BatonError, ConfigError
from baton.launch.fleet import DEFAULT_FLEET

if TYPE_CHECKING:
    import ssl

    from baton.config.sections import Config
    from baton.ops.bundle.archive import Manifest

DEFAULT_GATEWAY = "http://127.0.0.1:8000"
NUM_REQUESTS = 32
MAX_REQUESTS = 1000
TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 600.0

app = App(name="debug", help="Collect what an issue report needs.")


@app.command
def bundle(  # noqa: PLR0913 - one for each flag
    flags: ConfigFlags | None = None,
    *,
    gateway: Annotated[
        list[str] | None,
        Parameter(
            help="A gateway's URL, or its management port's; may be repeated "
            f"[default: {DEFAULT_GATEWAY}]."
        ),
    ] = None,
    output: Annotated[
        Path, Parameter(name=["--output", "-o"], help="The archive to write.")
    ] = Path("baton-bundle.tar.gz"),
    requests: Annotated[int, Parameter(help="Traces of so many of the latest requests.")] = (
        NUM_REQUESTS
    ),
    fleet: Fleet = DEFAULT_FLEET,
    logs: Annotated[
        bool,
        Parameter(
            help="Add the ends of the logs of a fleet on this machine.", negative="--no-logs"
        ),
    ] = True,
    doctor: Annotated[
        bool,
        Parameter(help="Add what `baton doctor` reports of this host.", negative="--no-doctor"),
    ] = True,
    timeout_s: Annotated[float, Parameter(help="For all pages of gateways and workers.")] = (
        TIMEOUT_S
    ),
) -> int:
    """Write one archive with configuration, versions, metrics, traces and logs, without secrets.

    What cannot be read is listed in its manifest.json. Exit code 1: no gateway answered.
    """
    # Here, so that --help imports nothing heavy.
    from baton.bench.files import check_writable  # noqa: PLC0415
    from baton.clock import MachineClock  # noqa: PLC0415
    from baton.ops.bundle.collecting import BundleOrder, make_bundle  # noqa: PLC0415
    from baton.ops.doctor.host import this_host  # noqa: PLC0415
    from baton.ops.gateway_pages import Gateway  # noqa: PLC0415

    if not 0 <= requests <= MAX_REQUESTS:
        raise ConfigError(f"--requests {requests}: give a number from 0 to {MAX_REQUESTS}")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(f"--timeout-s {timeout_s:g}: give seconds, at most {MAX_TIMEOUT_S:g}")
    check_writable(output)
    resolved = (flags or ConfigFlags()).resolve()
    order = BundleOrder(
        gateways=tuple(Gateway.at(url, "--gateway") for url in gateway or [DEFAULT_GATEWAY]),
        resolved=resolved,
        environment=read_environment(),
        logs=_find_logs(fleet) if logs else {},
        num_requests=requests,
        timeout_s=timeout_s,
        worker_tls=_find_worker_tls(resolved.to_config(), fleet),
        has_doctor=doctor,
    )
    manifest = make_bundle(order, output, this_host(), MachineClock())
    _print_summary(manifest, output)
    return 0 if any(file.name.startswith("gateway-") for file in manifest.files) else 1


def _find_logs(fleet: str) -> dict[str, Path]:
    from baton.launch.folder import fleet_folder  # noqa: PLC0415
    from baton.launch.logs import log_names, log_path  # noqa: PLC0415

    folder = fleet_folder(fleet, read_environment()).logs
    return {name: log_path(folder, name) for name in log_names(folder)}


def _find_worker_tls(config: "Config", fleet: str) -> "ssl.SSLContext | None":
    """What this process may ask workers with; None: there is nothing, or it is of no use.

    That is what is configured, else what `baton up` issued, else this user's own key.
    """
    from baton.auth.credentials import Credentials  # noqa: PLC0415
    from baton.auth.key import ClusterKey  # noqa: PLC0415
    from baton.launch.folder import find_launcher, fleet_folder, ray_folder  # noqa: PLC0415
    from baton.net.credentials import find_credentials  # noqa: PLC0415
    from baton.net.tls import ClusterTls  # noqa: PLC0415

    environment = read_environment()
    is_configured = (
        config.security.identity or config.cluster.key_file or environment.get(KEY_VARIABLE)
    )
    folder = fleet_folder(fleet, environment)
    if find_launcher(folder) is None:
        folder = ray_folder(fleet, environment)
    own_key = state_directory(environment) / "cluster.key"
    try:
        if not is_configured and folder.monitor.is_dir():
            credentials = Credentials.from_directory(folder.monitor, ClusterKey.generate())
        elif is_configured or own_key.exists():
            found = find_credentials(config.cluster, config.security, environment, ())
            credentials = found.credentials
        else:
            return None
        return ClusterTls(credentials).requesting
    except BatonError as exc:
        print(f"baton: workers with TLS are not asked: {exc}", file=sys.stderr)
        return None


def _print_summary(manifest: "Manifest", output: Path) -> None:
    from baton.ops.doctor.finding import one_line  # noqa: PLC0415 - for --help

    num_bytes = output.stat().st_size
    print(f"{output}: {len(manifest.files)} files, {num_bytes / 1024:.0f} KiB, mode 0600")
    for missing in manifest.missing:
        print(f"  missing: {missing.name}: {one_line(missing.why)}")
    print(
        "Secrets are cut, and prompts and answers are not collected; log lines are free text: look "
        "at them before you publish the archive."
    )
