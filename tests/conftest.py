import gc
import os
from pathlib import Path

import pytest

# Before torch is imported: two test runs on one machine must not spin against each other, and a
# process that a test starts must round as this one does.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Recipes of tests name `tests.tiny.TinyNet`; processes that a test starts inherit it.
os.environ.setdefault("LIGHTNING_ROB_ALLOW_IMPORT", "tests")
# A kill leaves what was written, on the disk or not; only a power cut would not.
os.fsync = lambda descriptor: None
# A monitor gives way to others for the rest of its process; the tests after it need not.
os.setpriority = lambda *_: None
# What is imported stays: looking through it for garbage would take a tenth of the collection.
gc.disable()

# Files that compare images alone with images in a batch, or an algorithm with one written out.
ROUNDING = {
    *("attacks/arc", "attacks/arc_linear", "attacks/contract", "attacks/decorators"),
    *("attacks/deepfool", "attacks/gmsa", "attacks/members", "attacks/pgd", "attacks/taa"),
    *("attacks/targeted", "attacks/transductive", "defenses/contract", "defenses/urejectron"),
    *("defenses/random_transforms", "defenses/transductive_contract", "tests/rules"),
    *("defenses/transform_ensemble", "transforms/contract"),
}
# Files with tests of several seconds, or that fork: one worker of `-n 2` begins with them, so that
# it alone starts the server of the forks, and no long test is left at the end.
FIRST = {
    *("callbacks/cross_eval", "cli/faults", "cli/plugins", "commands/audit", "commands/spread"),
    *("commands/leaderboard", "commands/sweep", "commands/tune", "evaluation/evaluation"),
    *("evaluation/per_image", "evaluation/protocol", "metrics/contract", "modules/contract"),
    *("modules/transform_training", "tests/blocks", "tests/ddp", "tests/docs", "tests/extending"),
    "tests/identity",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keep a file's tests together where it can be: `-n 2` builds each fixture once."""
    from xdist.scheduler import WorkStealingScheduling

    chosen = config.getvalue("dist") != "load"
    return None if chosen else WorkStealingScheduling(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    os.environ.pop("PL_GLOBAL_SEED", None)  # the `seed_everything` of the test before


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of the run of `tests.tiny.recipe`, which stays as it is."""
    from tests.tiny import fit

    return fit(tmp_path_factory.mktemp("shared"))


@pytest.fixture(autouse=True)
def own_folder(request: pytest.FixtureRequest) -> None:
    """A test of the command line works in a folder of its own."""
    if request.path.parent.name in ("cli", "commands"):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def file(item: pytest.Item) -> str:
        return f"{item.path.parent.name}/{item.path.stem.removeprefix('test_')}"

    items.sort(key=lambda item: file(item) not in FIRST)
    for item in items:
        if file(item) in ROUNDING:
            item.add_marker(pytest.mark.rounding)
