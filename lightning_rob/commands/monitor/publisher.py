"""Publishes the state of a monitor: metrics, page and health."""

from typing import TYPE_CHECKING

from lightning_rob.commands.configs import MonitorConfig
from lightning_rob.commands.monitor.page import LivePage
from lightning_rob.commands.monitor.server import App, Health, Server
from lightning_rob.commands.monitor.snapshot import Snapshot

if TYPE_CHECKING:
    from lightning_rob.commands.monitor.metrics import Metrics


class Publisher:
    """Publishes snapshots over HTTP and as a file, where the options ask for it.

    Page and metrics of one address share a server; each server has /healthz.

    Args:
        config: options.

    Raises:
        InputError: a port cannot be used.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self.health = Health(config.every)
        self.metrics = _metrics(config)
        self.page: LivePage | None = None
        served: dict[tuple[str, int], dict[str, App]] = {}
        options: dict[tuple[str, int], str] = {}
        if config.serve is not None:
            self.page = LivePage(config.serve_host, self.health)
            address = config.serve_host, config.serve
            served[address], options[address] = {"/": self.page.app}, "--serve"
        if self.metrics and config.metrics_port is not None:
            address = config.metrics_host, config.metrics_port
            served.setdefault(address, {})["/metrics"] = self.metrics.app
            options.setdefault(address, "--metrics_port")
        self.servers = [
            Server(*address, apps | {"/healthz": self.health.app}, options[address])
            for address, apps in served.items()
        ]

    @property
    def wanted(self) -> bool:
        """Whether the options ask for anything."""
        return bool(self.page or self.metrics)

    def update(self, run: str, snapshot: Snapshot) -> None:
        """Publish the state of the monitor of a run."""
        self.health.look()
        if self.page:
            self.page.snapshots[run] = snapshot
        if self.metrics:
            self.metrics.update(run, snapshot)

    def close(self) -> None:
        """End the servers."""
        for server in self.servers:
            server.close()


def _metrics(config: MonitorConfig) -> "Metrics | None":
    """Return where metrics are published, if the options say so."""
    if config.metrics_port is None and config.metrics_file is None:
        return None
    from lightning_rob.commands.monitor.metrics import Metrics  # the package is an extra

    return Metrics(config.metrics_file)
