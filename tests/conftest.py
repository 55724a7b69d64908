import os

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

# Files that compare images alone with images in a batch, or an algorithm with one written out.
ROUNDING = {
    *("arc", "arc_linear", "contract", "decorators", "deepfool", "gmsa", "members"),
    *("pgd", "random_transforms", "rules", "taa", "targeted"),
    *("transductive", "transductive_contract", "transform_ensemble", "urejectron"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keep a file's tests together where it can be: `-n 2` builds each fixture once."""
    from xdist.scheduler import WorkStealingScheduling

    chosen = config.getvalue("dist") != "load"
    return None if chosen else WorkStealingScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in ROUNDING:
            item.add_marker(pytest.mark.rounding)
