"""Checkpoints in a bucket: the same figures as of a folder, no object fetched twice, faults."""

import shutil
import time
from contextlib import closing
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_rob.commands.monitor import folder, loop
from lightning_rob.commands.monitor.history import History
from lightning_rob.commands.monitor.source import Bucket, Unreachable
from tests.commands import test_monitor
from tests.commands.test_monitor import EPOCHS, changed, evaluated, events, lines, swapped, watch

trained = test_monitor.trained
monitor = test_monitor.monitor
ROOT = "/bucket/run"
URL = f"memory:/{ROOT}"


@pytest.fixture
def bucket(monkeypatch):
    """An empty file system in memory that records the objects that are fetched."""
    files = MemoryFileSystem()
    fetched, get_file = [], MemoryFileSystem.get_file

    def recorded(self, path, *args, **options):
        fetched.append(Path(path).name)
        return get_file(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", recorded)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    files.fetched = fetched
    return files


@pytest.fixture
def put(trained, bucket):
    """Puts checkpoints of the fit into the bucket."""

    def some(*names, under=None):
        for name in names:
            content = (trained / name).read_bytes()
            bucket.pipe_file(f"{ROOT}/checkpoints/{under or name}", content)
            time.sleep(1e-3)  # another time of change

    return some


def figures(home):
    found = [line for line in lines(home) if "name" in line]
    return {(line["weights"], line["name"]): (line["accuracy"], line["interval"]) for line in found}


def compared(home):
    return {e["step"]: [e.get("change"), e.get("drops")] for e in events(home, "evaluated")}


def test_a_bucket_gives_the_figures_of_a_folder(trained, bucket, put, tmp_path):
    local = tmp_path / "local"
    shutil.copytree(trained, local / "checkpoints", ignore=lambda *_: EPOCHS[2:])
    put(*EPOCHS[:2], "last.ckpt")
    home = tmp_path / "home"
    (tmp_path / "done").touch()
    assert monitor(trained, local, "--once") == 0
    options = ("--until", tmp_path / "done", "--out", home)
    assert monitor(trained, URL, *options) == 0
    assert figures(home) == figures(local) and compared(home) == compared(local)
    assert evaluated(home) == [*EPOCHS[:2], "last.ckpt"]
    assert sorted(n for n in bucket.fetched if n.endswith("t")) == [*EPOCHS[:2], "last.ckpt"]
    assert not (home / "monitor_cache").exists()
    bucket.fetched.clear()
    assert monitor(trained, URL, *options) == 0
    assert bucket.fetched == []
    assert len(evaluated(home)) == 3


def test_a_bucket_that_refuses_is_read_again(trained, bucket, put, tmp_path, monkeypatch, capsys):
    find, home, refusal = MemoryFileSystem.find, tmp_path / "home", []

    def refusing(self, *args, **options):
        if refusal:
            raise refusal[0]
        return find(self, *args, **options)

    put(EPOCHS[0])
    monkeypatch.setattr(MemoryFileSystem, "find", refusing)
    happens = [
        lambda: refusal.append(PermissionError("Access Denied")),
        lambda: put(EPOCHS[1]),
        lambda: None,
        refusal.clear,
        (tmp_path / "done").touch,
    ]
    monkeypatch.setattr(loop.time, "sleep", lambda seconds: happens.pop(0)() if happens else 0)
    assert monitor(trained, URL, "--out", home, "--until", tmp_path / "done") == 0
    assert evaluated(home) == EPOCHS[:2]
    error = capsys.readouterr().err
    told = f"{URL} cannot be listed: PermissionError: Access Denied; trying again"
    assert error.count(told) == error.count("again\n") - 1 == 1
    assert f"{URL} can be watched again" in error
    assert not events(home, "missed")
    refusal.append(PermissionError("Access Denied"))
    assert monitor(trained, URL, "--out", home, "--once") == 2
    assert "error: memory://bucket/run cannot be listed" in capsys.readouterr().err


def test_a_single_object_that_is_replaced(trained, bucket, tmp_path):
    changed(trained / EPOCHS[3], tmp_path / "worse.ckpt", swapped, step=2)
    home, url = tmp_path / "home", "memory://bucket/production.ckpt"
    for path, code in ((trained / EPOCHS[3], 0), (tmp_path / "worse.ckpt", 1)):
        bucket.pipe_file("/bucket/production.ckpt", path.read_bytes())
        assert watch(trained, url, "--out", home, "--drop=significant") == code
        time.sleep(1e-3)
    assert [event["step"] for event in events(home, "evaluated")] == [16, 2]
    assert bucket.fetched == ["production.ckpt"] * 2
    bucket.rm("/bucket/production.ckpt")
    assert watch(trained, url, "--out", home) == 2


@pytest.fixture
def scanned(tmp_path):
    """A scan of the bucket with its history, and its cache."""
    with closing(History(tmp_path / "home")) as history:
        source = Bucket(URL, tmp_path / "cache")
        yield folder.CheckpointFolder(source, history, lambda line: history.append(line))


def test_a_damaged_object_is_not_fetched_again(bucket, put, scanned, monkeypatch):
    monkeypatch.setattr(folder, "SETTLE", 0.0)
    put(EPOCHS[0])
    content = bytearray(bucket.cat_file(f"{ROOT}/checkpoints/{EPOCHS[0]}"))
    content[len(content) // 2] ^= 1
    bucket.pipe_file(f"{ROOT}/checkpoints/{EPOCHS[0]}", bytes(content))
    for _ in range(4):
        scanned.scan()
    (broken,) = scanned.history.events("broken")
    assert "is damaged" in broken["alarm"][0]
    assert bucket.fetched == [EPOCHS[0]]
    put(EPOCHS[0])
    scanned.scan()
    assert list(scanned.found) == [f"checkpoints/{EPOCHS[0]}"]


def test_an_object_replaced_during_its_fetch_comes_again(bucket, put, scanned, monkeypatch):
    put(EPOCHS[0], under="last.ckpt")
    get_file = MemoryFileSystem.get_file

    def replaced(self, *args, **options):
        monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
        get_file(self, *args, **options)
        put(EPOCHS[1], under="last.ckpt")

    monkeypatch.setattr(MemoryFileSystem, "get_file", replaced)
    scanned.scan()
    assert not scanned.found
    scanned.scan()
    assert [file.step for file in scanned.found.values()] == [8]
    assert not scanned.source.cache.exists()


def test_a_refused_object_blocks_no_other(trained, bucket, put, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folder, "SETTLE", 0.0)
    home = tmp_path / "home"
    put(*EPOCHS[:2])
    refused, get_file = {EPOCHS[1]}, MemoryFileSystem.get_file

    def refusing(self, path, *args, **options):
        if Path(path).name in refused:
            raise PermissionError("Access Denied")
        return get_file(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", refusing)
    assert watch(trained, URL, "--out", home, "--every=0.01") == 1 and evaluated(home) == EPOCHS[:1]
    (broken,) = events(home, "broken")
    assert f"{EPOCHS[1]} cannot be fetched: PermissionError: Access Denied" in broken["alarm"][0]
    assert watch(trained, URL, "--out", home, "--every=0.01") == 0
    assert len(events(home, "broken")) == 1
    refused.clear()
    assert watch(trained, URL, "--out", home) == 0 and evaluated(home) == EPOCHS[:2]
    assert not events(home, "missed")
    refused.update(EPOCHS)
    shutil.rmtree(home / "monitor_scores")
    assert watch(trained, URL, "--out", home) == 2  # nothing can be fetched
    assert "cannot be fetched" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.filterwarnings("ignore")  # of mlflow
def test_an_alias_that_moves_is_a_new_checkpoint(trained, tmp_path, monkeypatch):
    """A rollback is one, too; a version without a Lightning checkpoint is an alarm."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(folder, "SETTLE", 0.0)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    client = mlflow.MlflowClient()
    run = client.create_run(client.create_experiment("e")).info.run_id
    client.create_registered_model("net")
    changed(trained / EPOCHS[3], tmp_path / "worse.ckpt", swapped, step=2)
    (tmp_path / "model.pth").touch()
    for path in (trained / EPOCHS[3], tmp_path / "worse.ckpt", tmp_path / "model.pth"):
        client.log_artifact(run, str(path), f"model/{path.stem}")
        client.create_model_version("net", f"runs:/{run}/model/{path.stem}", run)
    home = tmp_path / "home"
    place = ("mlflow:models/net@production", "--out", home)
    assert watch(trained, *place) == 2
    for version, code in (("1", 0), ("1", 0), ("2", 1), ("1", 0), ("3", 1)):
        client.set_registered_model_alias("net", "production", version)
        assert watch(trained, *place, "--every=0.01", "--drop=significant") == code
    found = events(home, "evaluated")
    assert [event["checkpoint"] for event in found] == [f"net-v{i}.ckpt" for i in (1, 2, 1)]
    assert found[1]["change"]["newly_vulnerable"] == found[2]["change"]["won_back"] != []
    (broken,) = events(home, "broken")
    assert "net-v3.ckpt: a version must hold one file *.ckpt, this one holds" in broken["alarm"][0]
    assert "model.pth" in broken["alarm"][0]


def test_a_file_system_without_stamps_is_refused(bucket, tmp_path, monkeypatch):
    """By its size alone a checkpoint of the same architecture would not be noticed."""
    info = plain = {"size": 9, "type": "file"}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: {f"{ROOT}/a.ckpt": info})
    source = Bucket(URL, tmp_path)
    with pytest.raises(Unreachable, match="neither an ETag nor a time"):
        source.stamps()
    for change in ({"modify": "20261122150405"}, {"Last-Modified": "Sun, 22 Nov"}):
        info = plain | change
        assert source.stamps()["a.ckpt"][0]


def test_passwords_in_errors_of_packages_are_not_passed_on():
    reason = "API request to http://me:p@ss@host/api?sig=hidden failed: http://a@b/c"
    told = str(Unreachable(reason))
    assert told == "API request to http://host/api?… failed: http://b/c"
