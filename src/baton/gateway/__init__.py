"""The front door: OpenAI's API in, one placed and pumped request out.

Enters: a client's HTTP request. Leaves: the decode worker's bytes, unchanged, as they come. The
gateway reads only the top level of the body, strips what clients may not say, signs a ticket, asks
the prefill and the decode worker at once, and frees both when the client leaves. It reaches
workers over the network (docs/wire/worker-http.md), never by import, and speaks two protocols:
that of Baton workers, and that of vLLM's own server with Baton's connector.

File map:
    options.py      `GatewayOptions`: what the operator decides
    process.py      `run_gateway`: socket, server, signals, drain
    app.py          `GatewayApp`: the allow-list of paths
    completions.py  one completion request: admission, deadlines, errors, accounting
    request_proxy.py     its two legs: placement, ticket, retry
    request_bodies.py   what both are sent, each in its protocol; vllm_adapter.py is vLLM's
    kv_load_failure.py      whether vLLM's 500 was for want of a request's KV
    non_disaggregable.py    requests that a vLLM worker serves whole
    prefill_request.py  the prefill worker's part, and telling decode when it fails
    prefill_result.py      what its answer says about its KV
    response_forwarder.py       the decode worker's bytes to the client
    request.py      parse, strip and rewrite the body; the request id
    upstream.py     HTTP to workers; foreign exceptions mapped
    interruptible.py    ending what a task does, for a reason
    workers.py      the registry of workers: who is up, and since which epoch
    health_monitor.py        asks one worker how it is, for ever
    worker_discovery.py asks it who it is
    worker_info.py  what a worker says about itself, checked; loads.py how full it is
    kv_events.py    which blocks vLLM workers hold; event_endpoints.py is where that is heard
    errors.py       OpenAI's error JSON and the status codes
    request_context.py  what the parts of one request record; services.py what all share
    fallbacks.py    counts and logs what went another way than intended
    asgi.py         the few ASGI messages
    inter_token_histogram.py, metrics.py, request_history.py, debug*.py   counted, remembered, shown
"""
