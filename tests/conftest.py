import os

# Before torch is imported: two test runs on one machine must not spin against each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Recipes of tests name `tests.tiny.TinyNet`; processes that a test starts inherit it.
os.environ.setdefault("LIGHTNING_ROB_ALLOW_IMPORT", "tests")
