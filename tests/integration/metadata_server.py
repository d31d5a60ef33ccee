"""The metadata services of three clouds, as far as they tell of preemption, on loopback."""

import threading
import time
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec

NAME = "vm-7"


class Cloud:
    """`notice_in_s` None: no notice. `changed` is set when that is to be looked at again."""

    def __init__(self):
        self.notice_in_s, self.resources, self.event_type = None, [NAME], "Preempt"
        self.broken_status, self.token, self.num_tokens = None, "", 0
        self.token_end = ""
        self.asked, self.changed = [], threading.Event()

    def preempt(self, in_s):
        self.notice_in_s = in_s
        self.changed.set()

    # EC2, version 2: a session token first; 404 until there is a notice
    def aws(self, method, path, headers):
        if (method, path) == ("PUT", "/latest/api/token"):
            if "x-aws-ec2-metadata-token-ttl-seconds" not in headers:
                return 400, b""
            self.num_tokens += 1
            self.token = f"token-{self.num_tokens}{self.token_end}"
            return 200, self.token.encode()
        if headers.get("x-aws-ec2-metadata-token") != self.token or not self.token:
            return 401, b""
        if path != "/latest/meta-data/spot/instance-action" or self.notice_in_s is None:
            return 404, b"not found"
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.notice_in_s))
        return 200, msgspec.json.encode({"action": "terminate", "time": at})

    # Compute Engine: a value with an ETag; an answer that waits for a change
    def gcp(self, path, headers):
        parts = urlsplit(path)
        asked = parse_qs(parts.query)
        if headers.get("metadata-flavor") != "Google":
            return 403, b""
        if parts.path != "/computeMetadata/v1/instance/preempted":
            return 404, b""
        if asked.get("wait_for_change") == ["true"] and asked.get("last_etag") == [self.etag]:
            self.changed.wait(float(asked["timeout_sec"][0]))
        return 200, b"FALSE" if self.notice_in_s is None else b"TRUE"

    @property
    def etag(self):
        return "5a1e" if self.notice_in_s is None else "77bd"

    # Azure: events of all machines of a scale set
    def azure(self, path, headers):
        parts = urlsplit(path)
        if headers.get("metadata") != "true" or "api-version" not in parse_qs(parts.query):
            return 400, b""
        if parts.path == "/metadata/instance/compute/name":
            return 200, NAME.encode()
        events = []
        if self.notice_in_s is not None:
            events.append({
                "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
                "EventStatus": "Scheduled",
                "EventType": self.event_type,
                "ResourceType": "VirtualMachine",
                "Resources": self.resources,
                "NotBefore": formatdate(time.time() + self.notice_in_s, usegmt=True),
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            })
        return 200, msgspec.json.encode({"DocumentIncarnation": 1, "Events": events})


@contextmanager
def serving(cloud, kind):
    """The URL at which `kind` (`aws`, `gcp`, `azure`) of this cloud answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            headers = {name.lower(): value for name, value in self.headers.items()}
            cloud.asked.append((self.command, self.path))
            if cloud.broken_status is not None:
                status, body = cloud.broken_status, b"out of order"
            elif kind == "aws":
                status, body = cloud.aws(self.command, self.path, headers)
            else:
                status, body = getattr(cloud, kind)(self.path, headers)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            if kind == "gcp":
                self.send_header("ETag", cloud.etag)
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET  # noqa: N815 - as the standard library calls it

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    running = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    running.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        cloud.changed.set()
        server.shutdown()
        server.server_close()
