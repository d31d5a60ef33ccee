"""The process around an engine: OpenAI's API in, tokens to the engine, text out, leg by leg.

Enters: HTTP (docs/wire/worker-http.md), updates from the engine's thread. Leaves: answers as JSON
or as server-sent events, one trace a request, metrics. The event loop owns everything here but
`EngineClient.sink` (the engine's thread) and tokenizing of long prompts (a thread pool).

File map, along the way of a request:
    app.py            raw ASGI: route, authorise, answer errors; http_exchange.py: one HTTP request
    fields.py         OpenAI's request bodies; unsupported.py: what is refused rather than ignored
    validation.py     body → fields, or why not
    prompts.py        fields → token ids and sampling; tokenizer.py and chat_template.py do it
    api_adapters.py       how the two generating APIs differ
    ticket_reader.py           ticket → colocated, prefill or decode leg
    generation.py     serves a request: admit, wait for the first token, answer
    engine_client.py         engine's thread ↔ event loop, deadlines, drain
    output_processor.py  tokens → text: detokenizer.py, stop_strings.py, logprobs.py
    replies.py        whole answers; streaming.py: the same as events
    error_responses.py       errors → status and OpenAI's error body
    status_pages.py   health, models, info, metrics, traces; abort of a handoff
    request_metrics.py  traces and metrics of requests; engine_collectors.py: the engine's own
    worker.py         `build_worker`: all of it around an engine and a handoff agent
    process.py        `run_worker`: the process; parent_watch.py, listener.py, cpu_affinity.py
    options.py        `WorkerOptions`, `ProcessOptions`; disabled_handoffs.py: without an agent
"""
