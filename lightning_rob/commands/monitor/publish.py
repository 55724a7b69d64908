"""Publishes the state of the watched sources over HTTP: page, metrics, health."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from lightning_rob.commands.configs import MonitorConfig
from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.page import page_app
from lightning_rob.commands.monitor.state import Snapshot
from lightning_rob.runtime.errors import InputError

NAMES = {"/": "page", "/metrics": "metrics", "/healthz": "health check"}
LIFE = 3600.0  # /healthz fails after as many seconds, and --every, without a look into the folder

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]  # of WSGI


class Publisher:
    """Publishes snapshots over HTTP and as a file, where the options ask for it.

    Page and metrics of one address share a server; each server has /healthz.

    Args:
        config: options.

    Raises:
        InputError: a port cannot be used, or the page's template cannot be read.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self.looked_at, self.limit = time.monotonic(), LIFE + config.every
        self.snapshots: dict[str, Snapshot] = {}  # by run
        self.metrics: Any = None
        apps: dict[tuple[str, int], dict[str, App]] = {}
        options: dict[tuple[str, int], str] = {}
        if config.serve is not None:
            address = config.serve_host, config.serve
            apps[address], options[address] = {"/": page_app(config, self)}, "--serve"
        if config.metrics_port is not None or config.metrics_file is not None:
            from lightning_rob.commands.monitor.metrics import Metrics  # the package is an extra

            self.metrics = Metrics(self.snapshots, config.metrics_file)
        if config.metrics_port is not None:
            address = config.metrics_host, config.metrics_port
            apps.setdefault(address, {})["/metrics"] = self.metrics.app
            options.setdefault(address, "--metrics_port")
        self.servers = [
            Server(*address, own | {"/healthz": self._health}, options[address])
            for address, own in apps.items()
        ]

    @property
    def wanted(self) -> bool:
        """Whether the options ask for anything."""
        return bool(self.servers or self.metrics)

    def update(self, run: str, snapshot: Snapshot) -> None:
        """Publish the state of a source, which was looked at now."""
        self.looked_at = time.monotonic()
        self.snapshots[run] = snapshot
        if self.metrics:
            self.metrics.write()

    @property
    def age(self) -> float:
        """Seconds since the last look."""
        return time.monotonic() - self.looked_at

    @property
    def healthy(self) -> bool:
        """Whether the last look is recent."""
        return self.age < self.limit

    def close(self) -> None:
        """End the servers."""
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def _health(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Respond with status 200, or 503 after too long without a look."""
        status = "200 OK" if self.healthy else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps({"healthy": self.healthy, "seconds_since_look": self.age}).encode()]


class Server(ThreadingMixIn, WSGIServer):
    """Serves WSGI applications, each at one path, to GET and HEAD.

    Args:
        host: address to listen on.
        port: port; 0 takes any that is free.
        apps: application of each path, one of `NAMES`.
        option: option that is named in the error.

    Raises:
        InputError: the port cannot be used.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, apps: Mapping[str, App], option: str) -> None:
        self.apps = apps
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = info[0]
            super().__init__((info[4][0], port), _Handler)  # type: ignore[arg-type]
        except (OSError, OverflowError) as error:
            raise InputError(f"{option} {port} on {host} cannot be used: {error}") from error
        self.set_app(self._respond)
        threading.Thread(target=self.serve_forever, daemon=True, name="server").start()
        name = f"[{host}]" if ":" in host else host
        root = f"http://{name}:{self.server_port}"
        warn("serving " + ", ".join(f"{NAMES[path]} {root}{path}" for path in apps))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, but not that a client was slow or closed its connection."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def _respond(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Call the application of a path; one that is unknown has status 404, a POST 405."""
        app, method = self.apps.get(environ["PATH_INFO"]), environ["REQUEST_METHOD"]
        if method not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return []
        if app is None:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            body: Iterable[bytes] = [f"only {', '.join(self.apps)}\n".encode()]
        else:
            body = app(environ | {"REQUEST_METHOD": "GET"}, start_response)
        return body if method == "GET" else []


class _Handler(WSGIRequestHandler):
    """Serves one request, and ends a connection that stays silent."""

    timeout = 10.0

    def log_message(self, *_: Any) -> None:
        """Log no request."""
