"""`baton explain`."""

import sys
from typing import Annotated

from cyclopts import Parameter


def explain(
    request: Annotated[str, Parameter(help="Its id, as in the header x-request-id.")],
    *,
    gateway: Annotated[
        str, Parameter(help="The gateway, or its management port.")
    ] = "http://127.0.0.1:8000",
    first_token: Annotated[bool, Parameter(help="Draw only until the first token.")] = False,
    layers: Annotated[bool, Parameter(help="Draw each layer, from computed to landed.")] = False,
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
    debug: Annotated[bool, Parameter(help="Show where an error arose.")] = False,
) -> int:
    """Draw where a request's time went: gateway, prefill, transfer and decode on one time axis.

    Also: its bytes and pages, the transport that was expected and the one used, and what the router
    predicted of it beside what happened.
    """
    del debug  # the caller looks at the command line itself
    # Here, so that --help imports nothing heavy.
    import msgspec  # noqa: PLC0415

    from baton.ops.explain import print_trace  # noqa: PLC0415
    from baton.ops.gateway_pages import Gateway  # noqa: PLC0415
    from baton.ops.request_traces import fetch_trace  # noqa: PLC0415

    trace = fetch_trace(Gateway.at(gateway, "--gateway"), request)
    if json:
        print(msgspec.json.format(msgspec.json.encode(trace)).decode())
    else:
        print_trace(trace, sys.stdout, until_first_token=first_token, with_layers=layers)
    return 0
