"""The process around an engine: OpenAI's API in, tokens to the engine, text out.

Enters: HTTP (docs/wire/worker-http.md), updates from the engine's thread. Leaves: answers as JSON
or as server-sent events, one trace per request, metrics. The event loop owns everything here except
`EngineClient.sink` (the engine's thread) and tokenization of long prompts (a thread pool).

File map, along the way of a request:
    app.py            routes, authorizes, answers errors; exchange.py: one HTTP request;
                      errors.py: what ends a request, and how that is answered
    fields.py         OpenAI's request bodies: fields, refused fields, validation
    prompts.py        fields to token ids and sampling
    ticket_reader.py  ticket to colocated, prefill or decode request
    generation.py     serves a request: admit, wait for the first token, answer
    engine_client.py  engine's thread to event loop and back, deadlines, drain
    output_processor.py  tokens to text: detokenizer, stop strings, log-probabilities
    replies.py        answers of the two generating APIs, whole and as events
    resumed_answer.py an answer whose first tokens another worker has sent
    standby.py        requests that wait for tokens which another worker samples
    status_pages.py   health, models, info, metrics, traces; abort of a handoff
    metrics.py        metrics and traces of requests; the engine's own statistics
    worker.py         `build_worker`: all of it around an engine and a handoff agent
    process.py        `run_worker`: the process, from its port to its end
    announcer.py, heartbeats.py  announce the worker to gateways; fence.py: until when it serves
    server_membership.py  the same for an engine that has a server of its own
    options.py        `WorkerOptions`, `ProcessOptions`
"""
