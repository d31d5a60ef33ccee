"""A server that answers by the clock: what a client reports of it is known beforehand.

    python benchmarks/fixed_latency_server.py --port 8123 [--ttft 0.5] [--itl 0.05]
    python benchmarks/bench_serve_clients.py --url http://127.0.0.1:8123 --model clockwork \
        --tokenizer src/baton/models/demo --concurrency 4 --input-len 64 --output-len 16

It speaks as much of OpenAI's completions as load generators ask for. Each token is due at its time
after the request came, so that a late one does not delay the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

MODEL = "clockwork"


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--ttft", type=float, default=0.5, help="seconds to the first token")
    parser.add_argument("--itl", type=float, default=0.05, help="seconds between tokens")
    options = parser.parse_args()

    async def complete(request: Request) -> StreamingResponse:
        came_s, body = time.monotonic(), await request.json()
        dues = [came_s + options.ttft + options.itl * i for i in range(body["max_tokens"])]
        return StreamingResponse(stream(body, dues), media_type="text/event-stream")

    routes = [
        Route("/v1/models", list_models),
        Route("/v1/completions", complete, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), port=options.port, log_level="warning")


async def list_models(_: Request) -> JSONResponse:
    """The only one."""
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def stream(body: dict[str, Any], dues: list[float]) -> AsyncIterator[str]:
    """A token at each due time, then what was used."""
    for number, due_s in enumerate(dues, start=1):
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        reason = "length" if number == len(dues) else None
        yield make_event([{"index": 0, "text": " a", "finish_reason": reason}])
    asked, given = len(body["prompt"]), len(dues)
    usage = {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}
    yield make_event([], usage=usage)
    yield "data: [DONE]\n\n"


def make_event(choices: list[dict[str, Any]], **more: object) -> str:
    """One chunk of a completion."""
    chunk = {"id": "cmpl-0", "object": "text_completion", "model": MODEL, "choices": choices}
    return f"data: {json.dumps(chunk | more)}\n\n"


if __name__ == "__main__":
    main()
