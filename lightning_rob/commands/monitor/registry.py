"""Checkpoints in the model registry of MLflow."""

import os
from pathlib import Path
from typing import Any

from lightning_rob.commands.locations import parse_model
from lightning_rob.commands.monitor.source import RemoteSource, Stamp, Unreachable, Version

QUIET = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"  # a bar on stderr for each download


class RegisteredModel(RemoteSource):
    """The version of a registered model that an alias names; another one is a new checkpoint.

    The server is that of the environment, `MLFLOW_TRACKING_URI` or `MLFLOW_REGISTRY_URI`.

    Args:
        url: `mlflow:models/NAME@ALIAS`.
        cache: folder of the copies.

    Raises:
        Unreachable: there is no such server.
    """

    def __init__(self, url: str, cache: Path) -> None:
        super().__init__(cache)
        import mlflow  # an extra

        os.environ.setdefault(QUIET, "false")
        self.url = url
        self.model, self.alias = parse_model(url)
        self.download = mlflow.artifacts.download_artifacts
        try:
            self.client: Any = mlflow.MlflowClient()
        except Exception as error:  # of any store
            raise Unreachable(f"{url} cannot be opened: {error}") from error

    def stamps(self) -> dict[str, Stamp]:
        """Return number and date of the version that the alias names."""
        try:
            found = self.client.get_model_version_by_alias(self.model, self.alias)
        except Exception as error:  # of any store
            raise Unreachable(f"{self.url} cannot be read: {error}") from error
        number = str(found.version)
        return {f"{self.model}-v{number}.ckpt": (number, found.creation_timestamp)}

    def fetch(self, version: Version, folder: Path) -> None:
        """Write the checkpoint of a version into a folder, if it has exactly one."""
        number = version[1][0]
        try:
            self.download(f"models:/{self.model}/{number}", dst_path=str(folder))
        except Exception as error:  # of any store
            raise Unreachable(f"{self.url}: version {number}: {error}") from error
        found = list(folder.rglob("*.ckpt"))
        if len(found) == 1:
            found[0].rename(folder / version[0])
