"""A collector of OpenTelemetry traces for tests.

`python -m tests.support.otlp_collector FILE [hang]` prints the collector's port, and appends each
span that comes by OTLP over HTTP to FILE as a line of JSON. With `hang` it accepts requests and
never answers.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


def plain(attributes: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in attributes if isinstance(each, KeyValue)}


def serve(path: str, *, hang: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if hang:
                threading.Event().wait()
            request = ExportTraceServiceRequest.FromString(
                self.rfile.read(int(self.headers["content-length"]))
            )
            with open(path, "a") as file:
                for resource in request.resource_spans:
                    for span in (span for scope in resource.scope_spans for span in scope.spans):
                        line = {
                            "path": self.path,
                            "service": plain(resource.resource.attributes)["service.name"],
                            "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "name": span.name,
                            "begin_ns": span.start_time_unix_nano,
                            "end_ns": span.end_time_unix_nano,
                            "attributes": plain(span.attributes),
                            "failed": span.status.code == span.status.STATUS_CODE_ERROR,
                            "words": span.status.message,
                        }
                        file.write(json.dumps(line) + "\n")
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], hang="hang" in sys.argv[2:])
