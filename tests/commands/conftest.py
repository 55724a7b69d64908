import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test works in a folder of its own."""
    monkeypatch.chdir(tmp_path)
