"""A child of a launch that loads no model: `stub_child.py BEHAVIOUR [PORT] … --status-fd N`.

worker      ready at once; ends on SIGTERM
stubborn    as a worker, but ignores SIGTERM
slow        as a worker, but reports on SIGTERM that it drains for a minute at most, and takes 0.5 s
loading     reports that it loads, and goes on with that
broken      writes a reason and ends before it is ready
spot        as a worker, but when a file named by STUB_DIE_FILE exists, removes it and reports
            that its machine is taken; when it exists again, ends with code 0
mortal      ready, then ends with code 7 when a file named by STUB_DIE_FILE exists
gateway     as a worker on the socket `--listen-fds`; answers all paths as /metrics.
            The workers that are up are those of the file `--members`, without those that drain
blind       as a gateway that sees no worker
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

METRICS = 'baton_gateway_worker_up{{role="decode",url="{url}"}} 1.0\n'
MODEL = 'baton_gateway_requests_total{mode="push",model="stub"} 0.0\n'
BUSY = 'baton_router_requests{{model="stub",part="decode",worker="{name}"}} {num}.0\n'


def serve(members, is_blind, listen_fds):
    """A gateway's server, and what ends it. Workers are not asked, and start without its module."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # noqa: PLC0415

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = metrics(members, is_blind).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.send_header("stub-pid", str(os.getpid()))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(listen_fds))
    server.server_port = server.socket.getsockname()[1]
    # Another process listens on it, too, and may have taken the connection before this one accepts.
    server.socket.setblocking(False)
    server.server_activate()
    server.daemon_threads = False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def end():
        server.shutdown()
        server.server_close()  # what it has accepted is answered

    return server.socket, end


def metrics(members, is_blind):
    if is_blind:
        return ""
    busy = json.loads(os.environ.get("STUB_BUSY", "{}"))
    urls = ["http://w"]
    if members is not None:
        listed = json.loads(Path(members).read_text())["workers"]
        urls = [each["url"] for each in listed if not each.get("draining")]
    lines = [MODEL, *(METRICS.format(url=url) for url in urls)]
    return "".join(lines + [BUSY.format(name=name, num=num) for name, num in busy.items()])


def die_when_told(path):
    while not path.exists():
        time.sleep(0.02)
    path.unlink()
    print("told to die", flush=True)
    os._exit(7)


def leave_when_told(path, status_fd):
    while not path.exists():
        time.sleep(0.02)
    path.unlink()
    status = {"event": "draining", "timeout_s": 25.0, "preempted": "its machine will be taken"}
    os.write(status_fd, json.dumps(status).encode() + b"\n")
    while not path.exists():
        time.sleep(0.02)
    os._exit(0)


def main():
    behaviour, port, *options = sys.argv[1:]
    given = dict(zip(options[::2], options[1::2], strict=True))
    status_fd = int(given["--status-fd"])
    print(f"{behaviour} starts", flush=True)
    if behaviour == "broken":
        print("No module named 'steam'", file=sys.stderr)
        sys.exit(3)
    if behaviour == "loading":
        os.write(status_fd, b'{"event":"loading","phase":"importing"}\n')
        signal.pause()
    if "--listen-fds" in given:
        sock, end = serve(given.get("--members"), behaviour == "blind", given["--listen-fds"])
    else:
        sock = socket.create_server(("127.0.0.1", int(port)))
        end = sock.close
    if behaviour == "mortal":
        path = Path(os.environ["STUB_DIE_FILE"])
        threading.Thread(target=die_when_told, args=(path,), daemon=True).start()
    if behaviour == "spot":
        arguments = Path(os.environ["STUB_DIE_FILE"]), status_fd
        threading.Thread(target=leave_when_told, args=arguments, daemon=True).start()
    ended = threading.Event()
    slow, stubborn = behaviour == "slow", behaviour == "stubborn"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: ended.set())
    ready = {
        "event": "ready",
        "url": f"http://127.0.0.1:{sock.getsockname()[1]}",
        "pid": os.getpid(),
    }
    os.write(status_fd, json.dumps(ready).encode() + b"\n")
    ended.wait()
    if slow:
        os.write(status_fd, b'{"event":"draining","timeout_s":60.0}\n')
        time.sleep(0.5)
    end()
    print(f"{behaviour} ends", flush=True)


main()
