"""A child of a launch that loads no model: `stub_child.py BEHAVIOUR [PORT] --status-fd N`.

worker      ready at once; ends on SIGTERM
stubborn    as a worker, but ignores SIGTERM
broken      writes a reason and ends before it is ready
mortal      ready, then ends with code 7 when a file named by STUB_DIE_FILE exists
gateway     as a worker, and answers /metrics and /v1/models over HTTP
blind       as a gateway that sees no worker
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

METRICS = b'baton_gateway_worker_up{url="http://w"} 1.0\n'


class Handler(BaseHTTPRequestHandler):
    metrics = METRICS

    def do_GET(self):
        models = b'{"object":"list","data":[{"id":"stub"}]}'
        body = self.metrics if self.path == "/metrics" else models
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def die_when_told(path):
    while not path.exists():
        time.sleep(0.02)
    path.unlink()
    print("told to die", flush=True)
    os._exit(7)


def main():
    behaviour, port, fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[4])
    print(f"{behaviour} starts", flush=True)
    if behaviour == "broken":
        print("No module named 'steam'", file=sys.stderr)
        sys.exit(3)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if behaviour == "blind":
        Handler.metrics = METRICS.replace(b"1.0", b"0.0")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if behaviour == "mortal":
        path = Path(os.environ["STUB_DIE_FILE"])
        threading.Thread(target=die_when_told, args=(path,), daemon=True).start()
    ended = threading.Event()
    stubborn = behaviour == "stubborn"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: ended.set())
    ready = {"event": "ready", "url": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid()}
    os.write(fd, json.dumps(ready).encode() + b"\n")
    ended.wait()
    print(f"{behaviour} ends", flush=True)


main()
