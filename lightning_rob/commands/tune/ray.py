"""A study of `tune` through Ray Tune, several trials at a time; needs the extra `ray`."""

import json
import logging
import os
import tempfile
from dataclasses import asdict
from typing import Any

import torch

from lightning_rob.commands.tune.study import Study, Trial, attempt

SETTINGS = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # data may be named by a relative path
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # `Record` keeps the trials
    "RAY_AIR_NEW_OUTPUT": "0",  # else it prints a banner
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns of a change to come
}
try:
    import ray
    from ray import tune
    from ray.tune.search import Searcher
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "--ray needs Ray Tune: pip install 'lightning-rob[ray]'", name="ray"
    ) from error


class StudySearcher(Searcher):
    """Hands the trials of a study to Ray Tune and takes their results; stays in this process."""

    def __init__(self, study: Study) -> None:
        super().__init__()
        self.study = study
        self.pending: dict[str, tuple[int, dict[str, float]]] = {}
        self.problem: ValueError | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state: Ray saves its searchers, but `tune` resumes from the record."""
        return {}

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial, as text that Ray does not inspect."""
        proposal = None
        if self.problem is None:
            try:
                proposal = self.study.next([*self.pending.values()])
            except ValueError as error:
                self.problem = error
        if proposal is None:
            return Searcher.FINISHED
        self.pending[trial_id] = proposal
        return {"proposal": json.dumps(proposal)}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record a trial; one whose process died has failed."""
        number, values = self.pending.pop(trial_id)
        trial = Trial(number, values, {}, 0.0, error="its process died")
        if result and "trial" in result:
            trial = Trial(**json.loads(result["trial"]))
        try:
            self.study.add(trial)
        except ValueError as problem:
            self.problem = problem

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        """Save nothing, for the same reason."""


def run_with_ray(study: Study, concurrent: int) -> None:
    """Run several trials at a time, on this machine or on the cluster that RAY_ADDRESS names."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    cpus = max((os.cpu_count() or 1) // concurrent, 1)
    here: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": cpus * concurrent}
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **here)
    searcher = StudySearcher(study)

    def train(config: dict[str, Any]) -> None:
        trial = attempt(evaluate, *json.loads(config["proposal"]))
        tune.report({"trial": json.dumps(asdict(trial))})

    evaluate = study.evaluate  # Ray copies what a function uses: not the whole study
    share = {"cpu": cpus, "gpu": min(torch.cuda.device_count() / concurrent, 1)}
    try:
        with tempfile.TemporaryDirectory() as folder:
            tune.Tuner(
                tune.with_resources(train, share),
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    num_samples=-1,
                    max_concurrent_trials=concurrent,
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(name="tune", storage_path=folder, verbose=0),
            ).fit()
    finally:
        ray.shutdown()
    if searcher.problem:
        raise searcher.problem
