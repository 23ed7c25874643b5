"""One span a request with its parts as children, in its client's trace; logs that name it."""

import io
import json
import logging
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.util.types import AttributeValue

from semantic.adapters.config.logging import LogFiles, configure_logging
from semantic.adapters.outbound.telemetry.tracing import RequestTracer
from tests.http_server import RunningServer, make_settings, run_server

pytestmark = pytest.mark.integration

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARTS = ["queue", "recall", "prefill", "decode", "seal", "persist"]
PHRASE = "nobody else may read this "


def ask(http: httpx.Client, flags: str = "01", **fields: object) -> httpx.Response:
    said = [{"role": "user", "content": PHRASE * 60}]
    body = {"model": "fake", "messages": said, "max_tokens": 6, "temperature": 0, **fields}
    headers = {"x-agent-id": "traced", "traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
    return http.post("/v1/chat/completions", json=body, headers=headers)


def settle(running: RunningServer) -> None:
    assert running.server.memory.disk is not None
    running.server.memory.disk.flush(60)


@pytest.fixture
def spans(running: RunningServer) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    running.server.metrics.tracer = RequestTracer(provider)
    return exporter


def tree(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
    """The one request, and its parts by name."""
    spans = exporter.get_finished_spans()
    (root,) = (span for span in spans if span.name == "request")
    parts = {span.name: span for span in spans if span is not root}
    assert root.context is not None
    for part in parts.values():
        assert part.parent is not None
        assert part.parent.span_id == root.context.span_id
        assert part.context is not None
        assert part.context.trace_id == int(TRACE, 16)
    return root, parts


def test_a_request_is_a_tree_in_its_clients_trace(
    running: RunningServer, spans: InMemorySpanExporter
) -> None:
    with running.client() as http:
        assert ask(http).status_code == 200
        settle(running)
        root, parts = tree(spans)
        assert root.parent is not None
        assert root.parent.span_id == int(PARENT, 16)
        attributes = root.attributes or {}
        assert attributes["semantic.agent"] == "traced"
        assert attributes["semantic.outcome"] == "max_tokens"
        assert attributes["gen_ai.usage.output_tokens"] == 6
        assert sorted(parts) == sorted(PARTS)
        starts = [parts[name].start_time or 0 for name in PARTS]
        assert [root.start_time or 0, *starts] == sorted([root.start_time or 0, *starts])
        recall: Mapping[str, AttributeValue] = {}
        for _ in range(50):  # what is slower to read than to compute is computed
            spans.clear()
            http.post("/v1/agents/traced/evict").raise_for_status()
            ask(http)
            settle(running)
            recall = tree(spans)[1]["recall"].attributes or {}
            if recall["semantic.tier"] == "disk" and int(str(recall["semantic.tokens"])) > 1000:
                break
    assert recall["semantic.tier"] == "disk"
    assert int(str(recall["semantic.bytes"])) >= 4 * int(str(recall["semantic.tokens"])) > 4000


def test_what_is_not_sampled_leaves_no_span(
    running: RunningServer, spans: InMemorySpanExporter
) -> None:
    with running.client() as http:
        assert ask(http, flags="00").status_code == 200
    settle(running)
    assert spans.get_finished_spans() == ()


def test_a_failed_span_names_the_kind_of_error(
    running: RunningServer, spans: InMemorySpanExporter
) -> None:
    model = running.server.device.model
    assert model is not None
    launch = model.backend.launch
    model.backend.launch = None  # type: ignore[method-assign, assignment]
    with running.client() as http:
        assert ask(http).status_code == 500
    model.backend.launch = launch  # type: ignore[method-assign]
    root, parts = tree(spans)
    assert root.status.description == "backend"
    assert {"queue", "recall"} <= parts.keys()
    assert "decode" not in parts


def test_spans_reach_a_collector(tmp_path: Path) -> None:
    received: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                received.extend(s.name for scope in resource.scope_spans for s in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        settings = make_settings(tmp_path, otel_endpoint=endpoint)
        with run_server(settings) as running, running.client() as http:
            ask(http)
        collector.shutdown()
    assert sorted(received) == sorted(["request", *PARTS])


# -- logs -------------------------------------------------------------------------------------


@pytest.fixture
def log(own_logging: logging.Logger, tmp_path: Path) -> Path:
    configure_logging("debug", "json", LogFiles(tmp_path / "logs"))
    own_logging.handlers[0].setStream(io.StringIO())  # type: ignore[attr-defined]
    return tmp_path / "logs" / "server.log"


@pytest.mark.parametrize("is_logged", [False, True], ids=["as-usual", "asked-for"])
def test_lines_name_request_agent_and_trace_and_no_prompt_unless_asked_for(
    log: Path, tmp_path: Path, is_logged: bool
) -> None:
    settings = make_settings(tmp_path, log_prompts=is_logged)
    with run_server(settings) as running, running.client() as http:
        reply = ask(http)
        assert ask(http, temperature=[PHRASE]).status_code == 400
        said = reply.json()["choices"][0]["message"]["content"]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = (x for x in lines if x["event"] == "request" and x["status"] == 200)
    assert line["request_id"] == reply.headers["x-request-id"]
    assert (line["agent"], line["trace_id"]) == ("traced", TRACE)
    is_told = any(PHRASE in json.dumps(x) for x in lines)
    assert is_told is is_logged
    assert not re.search(re.escape(said), log.read_text())
