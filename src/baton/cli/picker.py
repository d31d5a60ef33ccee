"""`baton picker`."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from baton.cli.flags import Sets
from baton.cli.gateway import FrontFlags, gateway_options
from baton.config.cluster_key import KEY_VARIABLE
from baton.config.environment import TOKENIZER_VARIABLES, change_environment
from baton.config.logs import configure_logging
from baton.errors import ConfigError


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PickerFlags(FrontFlags):
    """Where Envoy asks, and the workers to choose from."""

    port: Annotated[
        int | None, Sets("gateway.port"), Parameter(help="The gRPC port; 0 takes a free one.")
    ] = None


def picker(flags: PickerFlags | None = None) -> int:
    """Choose workers for requests that Envoy forwards: no request goes through this process."""
    try:
        from baton.gateway.picker.server import run_picker  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError(
            f"the endpoint picker needs gRPC ({exc}); run: pip install 'baton-kv[picker]'"
        ) from exc

    flags = flags or PickerFlags()
    config = flags.resolve().to_config()
    configure_logging(config.log)
    options = gateway_options(config, flags.status_fd)
    if options.processes > 1:
        raise ConfigError("a picker is one process: start several, each with a port of its own")
    change_environment(TOKENIZER_VARIABLES, (KEY_VARIABLE,))
    run_picker(options)
    return 0
