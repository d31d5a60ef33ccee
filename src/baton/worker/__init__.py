"""The process around an engine: OpenAI's API in, tokens to the engine, text out, leg by leg.

Enters: HTTP (docs/wire/worker-http.md), updates from the engine's thread. Leaves: answers as JSON
or as server-sent events, one trace a request, metrics. The event loop owns everything here but
`EngineBridge.sink` (the engine's thread) and tokenizing of long prompts (a thread pool).

File map, along the way of a request:
    app.py            raw ASGI: route, authorise, watch for the client leaving
    exchange.py       one HTTP request and its answer
    fields.py         OpenAI's request bodies as schemas; validation.py: body → schema, or why not
    prompts.py        body → token ids; tokenizer.py and chat_template.py do it
    legs.py           ticket → colocated, prefill or decode leg
    bridge.py         engine thread ↔ event loop, admission and drain
    generation.py     serves both generating endpoints; prefill.py answers prefill legs
    answer.py         tokens → text: detokenizer.py, stopping.py (stop strings), logprobs.py
    replies.py        OpenAI's answers as schemas; streaming.py: the same as events
    status_pages.py   health, models, info, metrics, traces; handoff abort
    problems.py       errors → status and OpenAI's error body
    scraping.py       engine statistics at each scrape; observing.py: what a finished leg counts
    worker.py         `build_worker`: all of the above around an engine and a handoff agent
    process.py        `run_worker`: the process; announcing.py, lifeline.py, listening.py serve it
"""
