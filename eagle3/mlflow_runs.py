"""Runs in MLflow: Lightning's logger, which goes on with the run that an earlier attempt began (beside the walk).

Without a server all runs of an output folder lie in one SQLite file there, so that MLflow shows a sweep's jobs side by
side: `mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db`. `trackers` makes every call in the tracker's thread.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger

from eagle3.artifacts import MANIFEST, Artifact
from eagle3.errors import RequestError

SERVER = "MLFLOW_TRACKING_URI"
SQLITE = "sqlite:///"
TRAINING = "eagle3.training"
SWEEP = "eagle3.sweep"
# MLflow reports its use to its makers and takes over the process's logging unless it is told not to.
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_CONFIGURE_LOGGING": "false"}


class MlflowLogger(MLFlowLogger):
    """`training` names what is trained: a run of the experiment that has it as a tag is continued. `group` is another
    tag, that of the sweep. Everything else is as with Lightning's."""

    def __init__(
        self, training: str, group: str | None = None, tags: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        own = {TRAINING: training} | ({} if group is None else {SWEEP: group})
        with _alone(settings.get("tracking_uri")):
            super().__init__(tags={**(tags or {}), **own}, **settings)
        self._training = training

    @property
    def experiment(self) -> Any:
        """MLflow's client; the first use finds or makes the run."""
        if not self._initialized:
            self._find()
        return super().experiment

    def log_hyperparams(self, params: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """As parameters, which MLflow never changes again, and whole as config.json, the newest attempt's."""
        known = self.experiment.get_run(self.run_id).data.params
        super().log_hyperparams({key: value for key, value in _flat(params).items() if key not in known})
        self.experiment.log_dict(self.run_id, dict(params), "config.json")

    def log_drafter(self, drafter: Artifact, states: Artifact) -> None:
        """The drafter and the manifest of its states. Without a server the weights stay where they are."""
        local = self._tracking_uri.startswith((SQLITE, "file:"))
        for path in sorted(drafter.folder.iterdir()):
            if path.is_file() and (path.name == MANIFEST or not local):
                self.experiment.log_artifact(self.run_id, str(path), "drafter")
        self.experiment.log_artifact(self.run_id, str(states.folder / MANIFEST), "states")
        for artifact in (drafter, states):
            self.experiment.set_tag(self.run_id, f"eagle3.{artifact.kind}", str(artifact.folder))

    def _find(self) -> None:
        from mlflow.exceptions import MlflowException

        client = self._mlflow_client
        experiment = client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            with suppress(MlflowException):  # a job beside this one was first
                client.create_experiment(self._experiment_name, artifact_location=self._artifact_location)
            experiment = client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            raise RuntimeError(f"experiment {self._experiment_name!r} could not be made")
        self._experiment_id = experiment.experiment_id
        for run in client.search_runs([experiment.experiment_id], f"tags.`{TRAINING}` = '{self._training}'"):
            self._run_id = run.info.run_id
            client.update_run(self._run_id, status="RUNNING")


@contextmanager
def _alone(uri: str | None) -> Iterator[None]:
    """Two jobs that make the tables of one SQLite file at once would both fail; the second waits."""
    if uri is None or not uri.startswith(SQLITE):
        yield
        return
    path = Path(uri.removeprefix(SQLITE).partition("?")[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            found |= _flat(item, f"{prefix}{key}/")
        else:
            found[f"{prefix}{key}"] = item
    return found


def store(mode: str, output_dir: Path) -> dict[str, Any]:
    """Where runs go, as arguments of the logger: the server that the environment names, else files in `output_dir`.

    RequestError for `logger.mode=online` without a server.
    """
    server = os.environ.get(SERVER)
    if mode == "online" and not server:
        raise RequestError(
            f"logger.mode: found online, expected {SERVER} in the environment to say where MLflow's server is; try "
            "logger.mode=offline"
        )
    if server and mode != "offline":
        return {"tracking_uri": server}
    root = output_dir.absolute()
    # Jobs beside each other wait for the file as long as it takes.
    return {"tracking_uri": f"{SQLITE}{root}/mlflow.db?timeout=60", "artifact_location": (root / "mlflow").as_uri()}
