"""Publishes the state of the watched sources over HTTP: page, metrics, health."""

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

from lightning_rob.commands.monitor import MonitorConfig
from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.history import timestamp
from lightning_rob.commands.monitor.page import Snapshot, page
from lightning_rob.commands.report.blocks import Paragraph, Warned, page_template
from lightning_rob.runtime.errors import InputError

LIFE = 3600.0  # /healthz fails after as many seconds, and --every, without a look into the folder
REFRESH = 30  # seconds between two loads of the page
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
PAGE = {
    "Content-Type": "text/html; charset=utf-8",
    # The page has neither scripts nor forms, and loads nothing; its style is inline.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Refresh": str(REFRESH),
}

Response = tuple[int, Mapping[str, str], bytes]  # status, headers, content


class Publisher:
    """Publishes snapshots over HTTP, if the options ask for it."""

    def __init__(self, config: MonitorConfig) -> None:
        self.looked_at, self.limit = time.monotonic(), LIFE + config.every
        self.snapshots: dict[str, Snapshot] = {}  # by run
        self.metrics: Any = None
        self.server: Server | None = None
        self.local = config.serve_host in LOCAL_NAMES
        if find_spec("prometheus_client"):
            from lightning_rob.commands.monitor.metrics import Metrics  # the package is an extra

            self.metrics = Metrics(self.snapshots)
        self.template = page_template(config.template)
        if config.serve is not None:
            self.server = Server(config.serve_host, config.serve, self)

    def update(self, run: str, snapshot: Snapshot) -> None:
        self.looked_at = time.monotonic()
        self.snapshots[run] = snapshot

    def close(self) -> None:
        if self.server:
            self.server.shutdown()
            self.server.server_close()

    def respond(self, path: str, headers: "Message[str, str]") -> Response:
        """Return the response to a request; no other path is read."""
        age = time.monotonic() - self.looked_at
        healthy = age < self.limit
        bare = path.partition("?")[0]
        if bare == "/healthz":
            content = json.dumps({"healthy": healthy, "seconds_since_look": age}).encode()
            return 200 if healthy else 503, {"Content-Type": "application/json"}, content
        if bare == "/metrics" and self.metrics:
            return 200, *self.metrics.encoded(headers.get("Accept", ""))
        if path != "/":
            return 404, {}, b"only /, /healthz and, with the extra prometheus, /metrics\n"
        # A page on this machine is only for names of this machine: the name of another that was
        # made to lead here belongs to a website, whose scripts could read the page.
        host = re.sub(r":\d+$", "", headers.get("Host", "")).strip("[]")
        if self.local and host not in LOCAL_NAMES:
            return 403, {}, b"open this page as localhost, or give its address to --serve_host\n"
        now = f"This page is of {timestamp()}; it refreshes itself every {REFRESH} s."
        hangs = "the monitor does not look into its folder any more: it hangs"
        first = Paragraph(now) if healthy else Warned(hangs)
        text = page(self.template, dict(self.snapshots), [first])
        return 200, PAGE, text.encode(errors="backslashreplace")


class Server(ThreadingHTTPServer):
    """Serves the responses of a publisher to GET and HEAD; port 0 takes any that is free."""

    request_queue_size = 64

    def __init__(self, host: str, port: int, publisher: Publisher) -> None:
        self.publisher = publisher
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = info[0]
            super().__init__((str(info[4][0]), port), _Handler)
        except (OSError, OverflowError) as error:
            raise InputError(f"--serve {port} on {host} cannot be used: {error}") from error
        threading.Thread(target=self.serve_forever, daemon=True, name="server").start()
        root = f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}"
        metrics = f"metrics {root}/metrics, " if publisher.metrics else ""
        warn(f"serving page {root}/, {metrics}health check {root}/healthz")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, but not that a client was slow or closed its connection."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0
    server: Server
    server_version, sys_version = "lightning-rob", ""

    def do_GET(self) -> None:
        """Send the response, to HEAD without its content."""
        status, headers, content = self.server.publisher.respond(self.path, self.headers)
        self.send_response(status)
        for header in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(*header)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Log no request."""
