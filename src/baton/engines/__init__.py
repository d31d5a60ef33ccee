"""Station 1: KV is computed here, layer by layer.

Enters: prompts as token ids, each of a kind (colocated, prefill or decode). Leaves: tokens through
one sink, and a registered region of pages that the handoff reads while they are being filled.

An engine never routes and never moves bytes: it reports to the `HandoffPort` what is ready, what it
expects, and which blocks may be touched. Frameworks (torch, transformers) stay in here.

File map:
    interface.py     the contract `Engine`, its requests, updates and stats; `EngineServer`, an
                     engine that brings a server of its own; `ENGINES` and `ENGINE_SERVERS`
    stall_detector.py  ungranted KV that blocks other requests; lookup_cost.py whether the store
                       is worth asking; first_tokens.py, checkpoint.py
    gpu/             pages on a GPU: gathered, scattered, copied to the host while the model runs
    transformers/    the embedded engine: any decoder-only Hugging Face model, on CPU or CUDA
    vllm/            a KV connector inside vLLM's own server, and the process that starts it
"""
