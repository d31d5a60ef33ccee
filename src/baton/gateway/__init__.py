"""The gateway: OpenAI's API in, one placed and forwarded request out.

Enters: a client's HTTP request. Leaves: the decode worker's bytes, unchanged, as they arrive
(of usage cached_tokens.py replaces one number); several answers are merged. The gateway parses
only the top level of the body, strips the fields that clients may not send, signs a ticket,
sends the request to the prefill and the decode worker, and cancels both when the client
disconnects. It reaches workers over the network (docs/wire/worker-http.md), never by import,
and supports two protocols: Baton workers, and vLLM's own server with Baton's connector.

File map, along the way of a request:
    process.py      `run_gateway`: socket, server, signals, drain; options.py: `GatewayOptions`
    process_group.py      several processes on one port
    clients.py      clients and their API keys: who may ask; audit.py: the log of who did
    app.py          `GatewayApp`: the allow-list of paths, readiness; asgi.py: ASGI messages
    completions.py  one completion request: admission, deadlines, errors, accounting
    request.py      parse, strip and rewrite the body; the request id; facts read from the body
    answer_plan.py  `n` and lists of prompts: which answers a body asks for
    several_answers.py    a request for each of them; answer_merge.py: one answer of all
    request_context.py    what is recorded about one request, and what all requests share
    admission.py    waiting for workers with room; targets.py: headers that name targets and class
    placing.py      what placement must know of a request
    prompt_tokenizer.py   its prompt as token ids, for policies that look at what is cached
    request_proxy.py      placement, ticket, prefill and decode request, retry
    prefill_request.py    the prefill worker's part; aborts at decode when it fails
    response_forwarder.py the decode worker's bytes to the client; the early first token
    cached_tokens.py      the prefill worker's, in the usage of a prompt that was handed over
    protocol_adapters.py  bodies and replies in the protocols of Baton and of vLLM
    upstream.py     what every request to a worker carries, and small answers in time
    connection_pool.py    a worker's idle connections, and how another one is made
    http_client.py  one connection to a worker: a request, its answer as it arrives
    interruptible.py      a stretch of a task that others may end
    errors.py       OpenAI's error JSON and the status codes
    fallbacks.py    why a request was not served as intended
    openapi.py      `/openapi.json`: what the gateway serves

Streams that go on at another worker:
    multiplexed_streams.py      the one connection by which all streams of a worker arrive
    running_streams.py    the streams under way; stream_record.py: what the client has of one (pure)
    resumption.py   a stream whose worker is lost; stream_replay.py: by the same answer again (pure)
    stream_moves.py       streams that are moved; standby.py: the new worker's request

Workers, metrics, debugging:
    workers.py      the registry: state, epoch and load of each worker, and its description
    worker_info.py  what a worker reports of itself, compared with how it is listed
    picker/         placement alone, for Envoy: an endpoint picker
    members/        lists of workers that are followed while the gateway runs
    worker_discovery.py   who a worker is, and how loaded
    health_monitor.py     what probes and requests show of each worker's health
    silence_monitor.py    what missing heartbeats show: suspected, and silent
    waiting.py      requests that wait until a worker is back; retries.py: turns of retries
    kv_events.py    which blocks vLLM workers hold
    prefixes.py     which prompts' beginnings workers have cached, of all models
    journal_feed.py       follows a worker's journal of its cache, or of its store
    report_feed.py  reads a page of every worker; link_feed.py: of what links cost
    rank_reports.py       one report of a server of those of its tensor-parallel ranks (pure)
    learned_costs.py      what was learned of workers' speed, in a file for the next gateway
    transfer_feed.py      of what transfers took; transfer_page.py, transfer_sums.py:
                    `/debug/transfers`, by pair and by distance; store_page.py: the store, there
    metrics.py, debug.py  Prometheus metrics; `/debug/workers`, `/debug/links`
    request_history.py    what is remembered of the latest requests
    request_traces.py     these, merged with what workers recorded; request_pages.py:
                    `/debug/requests`
    tail_sampling.py      which are sampled, slow or failed; kept_traces.py: those, complete
    otel_export.py  traces to an OpenTelemetry collector; otel_mapping.py: as which spans
    trace_metrics.py      how many traces were kept, exported and lost
    queue_metrics.py, queue_page.py   the same of what waits; `/debug/queue`
    target_metrics.py     requests that missed a target of their model
    demand_page.py        `/debug/demand`: what an autoscaler reads
    alerts/         `/alerts`: what is wrong with links, handoffs, the store, predictions, targets
    dashboard/      `/dashboard`, a page for operators; management_key.py: the key in front of it
    route_explainer.py    `/debug/route`: where a request would go, and why
"""
