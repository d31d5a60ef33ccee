"""A process that speaks as much of vLLM's HTTP as a peer's arm needs; it has no engine.

Like vLLM with NixlConnector on CPUs it moves itself to the machine's last core, answers prefill
with what decode must be told, and counts where prompts' KV came from.
"""

from __future__ import annotations

import json
import os
import sys

from aiohttp import web

COUNTS = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
TOLD = {"do_remote_prefill": True, "remote_request_id": "r", "remote_block_ids": [[1]]}
BYTES_PER_TOKEN = 64


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    params, num_tokens = body.get("kv_transfer_params") or {}, len(body["prompt"])
    if body["prompt"] == [13]:
        return web.json_response({"error": {"message": "thirteen"}}, status=400)
    if params.get("do_remote_decode"):
        assert (body["max_tokens"], body["stream"]) == (1, False)
        COUNTS["local_compute"] += num_tokens
        return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": TOLD})
    source = "external_kv_transfer" if params == TOLD else "local_compute"
    COUNTS[source] += num_tokens
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for i in range(body["max_tokens"]):
        reason = "length" if i == body["max_tokens"] - 1 else None
        choice = {"index": 0, "text": "a", "finish_reason": reason}
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def count(_: web.Request) -> web.Response:
    lines = [
        f'vllm:prompt_tokens_by_source_total{{engine="0",source="{source}"}} {num}.0'
        for source, num in COUNTS.items()
    ]
    num_bytes = COUNTS["external_kv_transfer"] * BYTES_PER_TOKEN
    lines.append(f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {num_bytes}.0')
    return web.Response(text="\n".join(lines) + "\n")


async def list_models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def say_well(_: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    os.sched_setaffinity(0, {max(range(os.cpu_count() or 1))})
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/metrics", count)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/health", say_well)
    print("stub is here", flush=True)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
