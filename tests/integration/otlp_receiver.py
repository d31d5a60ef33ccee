"""A collector for tests: takes OTLP over HTTP and decodes it with OpenTelemetry's own schema."""

from __future__ import annotations

import contextlib
import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Generator


class OtlpReceiver:
    """`received` are the requests that it decoded; `answer` is called before each is answered."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        self.status = 200
        self.release = threading.Event()
        self.release.set()
        self.arrived = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.arrived.set()
                receiver.release.wait(20)
                if receiver.status == 200:
                    receiver.received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    @property
    def spans(self) -> list[tuple[str, object]]:
        """`(service.instance.id, span)` of all that was received."""
        return [
            (_text(resource.resource.attributes, "service.instance.id"), span)
            for request in tuple(self.received)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def read_attributes(span: object) -> dict[str, object]:
    """A span's attributes, by name."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def _text(attributes: object, name: str) -> str:
    return next((each.value.string_value for each in attributes if each.key == name), "")


@contextlib.contextmanager
def receiving() -> Generator[OtlpReceiver]:
    """A receiver that answers at once, until the block ends."""
    receiver = OtlpReceiver()
    thread = threading.Thread(target=receiver.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.release.set()
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join(5)
