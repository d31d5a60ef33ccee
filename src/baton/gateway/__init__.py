"""The front door: OpenAI's API in, one placed and pumped request out.

Enters: a client's HTTP request. Leaves: the decode worker's bytes, unchanged, as they come. The
gateway reads only the top level of the body, strips what clients may not say, signs a ticket, asks
the prefill and the decode worker at once, and frees both when the client leaves. It reaches
workers over the network (docs/wire/worker-http.md), never by import, and speaks two dialects:
that of Baton workers, and that of vLLM's own server with Baton's connector.

File map:
    options.py      `GatewayOptions`: what the operator decides
    process.py      `run_gateway`: socket, server, signals, drain
    app.py          `GatewayApp`: the allow-list of paths
    completions.py  one completion request: admission, deadlines, errors, accounting
    exchange.py     its two legs: placement, ticket, retry
    leg_bodies.py   what both are sent, each in its dialect; vllm_dialect.py is vLLM's
    lost_kv.py      whether vLLM's 500 was for want of a request's KV
    undivided.py    requests that a vLLM worker serves whole
    prefill_leg.py  the prefill worker's part, and telling decode when it fails
    verdict.py      what its answer says about its KV
    answer.py       the decode worker's bytes to the client
    request.py      parse, strip and rewrite the body; the request id
    upstream.py     HTTP to workers; foreign exceptions mapped
    interrupt.py    ending what a task does, for a reason
    workers.py      the registry of workers: who is up, and since which epoch
    probe.py        asks one worker how it is, for ever
    introduction.py asks it who it is
    worker_info.py  what a worker says about itself, checked; loads.py how full it is
    kv_events.py    which blocks vLLM workers hold; event_endpoints.py is where that is heard
    errors.py       OpenAI's error JSON and the status codes
    call.py         what the parts of one request note about it; services.py what they all share
    fallbacks.py    counts and logs what went another way than intended
    asgi.py         the few ASGI messages
    gaps.py, metrics.py, records.py, debug*.py   counted, remembered, shown
"""
