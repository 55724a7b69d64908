"""Notifications of the monitor: a real receiver that fails, hangs, redirects; kills; secrets."""

import json
import os
import signal
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lightning_rob.commands.monitor import notify
from lightning_rob.commands.monitor.display import Display
from lightning_rob.commands.monitor.history import History
from lightning_rob.commands.monitor.notify import Outbox
from lightning_rob.commands.monitor.urls import AUTHORIZATION, check_destinations, receiver_name

SECRET = "Bearer s3cret-token"


class Receiver(ThreadingHTTPServer):
    """Records what it is sent, and replies with the next status; hangs at 0."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.daemon_threads = True
        self.statuses, self.posts, self.headers = [], [], []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.go = threading.Event()
        threading.Thread(target=partial(self.serve_forever, 0.01), daemon=True).start()

    def ids(self):
        return [post["id"] for post in self.posts]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = server.statuses.pop(0) if server.statuses else 204
        if status == 0:
            server.go.wait(30)
            return
        server.posts.append(json.loads(body) | {"status": status})
        server.headers.append(dict(self.headers))
        self.send_response(status)
        self.send_header("Location", f"{server.url}/elsewhere")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setattr(notify, "PAUSES", (0.01, 0.02))
    with Receiver() as server:
        yield server
        server.go.set()
        server.shutdown()


@pytest.fixture
def history(tmp_path):
    opened = History(tmp_path)
    yield opened
    opened.close()


def evaluation(step=1, worst=0.25, alarm=()):
    """The lines of a checkpoint."""
    head = {"checkpoint": f"{step}.ckpt", "step": step, "position": step, "suite": "s"}
    figure = {"name": "worst", "stage": "monitor", "accuracy": worst, "n": 8}
    figure["interval"] = [worst - 0.1, worst + 0.1]
    event = {"event": "evaluated", "weights": str(step), "recipe": "r", "alarm": list(alarm)}
    return figure | head, event | head


def record(history, notifier, *lines):
    lines = (*lines[:-1], lines[-1] | notifier.mark(lines[-1]))
    history.append(*lines)
    notifier.deliver()


def delivered(history):
    return [event["id"] for event in history.events("notified")]


def test_a_receiver_that_fails_thrice_accepts_once(receiver, history, monkeypatch, capsys):
    """Redirects are not followed, which would lead the secret elsewhere."""
    monkeypatch.setenv(AUTHORIZATION, SECRET)
    receiver.statuses = [500, 302, 307]
    url = f"{receiver.url}/T0/B0/hidden?token=hidden"
    notifier = Outbox([url], history, "/run")
    record(history, notifier, *evaluation(1, 0.5))
    record(history, notifier, *evaluation(2, 0.25, ["robust/worst is 0.25, below 0.4"]))
    record(history, notifier, *evaluation(3, 0.5))
    record(history, notifier, *evaluation(4, 0.5))
    notifier.close(10)
    accepted = [post for post in receiver.posts if post["status"] == 204]
    assert [post["kind"] for post in accepted] == ["alarm", "recovery"]
    assert delivered(history) == [post["id"] for post in accepted]
    assert [post["status"] for post in receiver.posts[:3]] == [500, 302, 307]
    assert len(receiver.posts) == 5
    alarm, recovery = accepted
    assert alarm["figures"] == {"worst": {"accuracy": 0.25, "interval": [0.15, 0.35], "n": 8}}
    assert alarm["text"] == "alarm: /run: 2.ckpt: robust/worst is 0.25, below 0.4"
    assert recovery["text"] == "recovery: /run: 3.ckpt: robust/worst is 50.0%"
    assert {header["Authorization"] for header in receiver.headers} == {SECRET}
    keys = [header["Idempotency-Key"] for header in receiver.headers]
    assert keys == receiver.ids()
    assert notifier.waiting == {receiver_name(url): 0}
    error = capsys.readouterr().err
    assert f"{receiver_name(url)} failed (HTTP status 500); trying again" in error
    assert f"{receiver_name(url)} accepts them again" in error
    for text in (error, history.path.read_text()):
        assert not any(secret in text for secret in ("hidden", "s3cret"))


def test_one_that_hangs_costs_one_time_out(receiver, history, monkeypatch, capsys):
    """It holds up no other receiver."""
    monkeypatch.setattr(notify, "PAUSES", (1.0, 300.0))
    monkeypatch.setattr(notify, "TIMEOUT", 0.2)
    monkeypatch.setattr(notify, "SLOW", 0.1)
    with Receiver() as hanging:
        hanging.statuses = [0] * 1000
        notifier = Outbox([hanging.url, receiver.url], history, "run")
        for step in range(8):
            lines = evaluation(step, alarm=[f"low at {step}"])
            history.append(*lines[:-1], lines[-1] | notifier.mark(lines[-1]))
        notifier.deliver()
        assert len(hanging.statuses) == 999  # it has heard of the first alone
        assert notifier.waiting == {hanging.url: 8, receiver.url: 0}
        assert notifier.pauses[hanging.url] > 1.7  # it costs a tenth of the time
        notifier.close(0)
        left = f"8 left for {hanging.url}; the next monitor delivers them"
        assert left in capsys.readouterr().err
        hanging.go.set()
        hanging.statuses.clear()
        notifier.close(10)  # at the end it is asked at once
        assert sorted(hanging.ids()) == sorted(receiver.ids()) and len(hanging.ids()) == 8
        hanging.shutdown()


def test_one_that_is_refused_slowly_holds_up_no_other(history, monkeypatch):
    monkeypatch.setattr(notify, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(notify, "SLOW", 0.05)
    notifier, tried = Outbox(["http://127.0.0.1:9/"], history, "run"), []

    def send(content):
        tried.append(content["checkpoint"])
        if content["checkpoint"] == "0.ckpt":
            time.sleep(0.1)
            raise notify.Undelivered("HTTP status 413")

    notifier.senders = dict.fromkeys(notifier.senders, send)
    for step in range(3):
        lines = evaluation(step, alarm=[f"low at {step}"] if step < 2 else [])
        history.append(*lines[:-1], lines[-1] | notifier.mark(lines[-1]))
    for _ in range(3):
        notifier.deliver()
    assert tried == ["0.ckpt", "1.ckpt", "0.ckpt", "0.ckpt"]  # the recovery waits for its alarm
    assert [*notifier.waiting.values()] == [2]


def forked(work) -> int:
    """A process of its own that needs no imports: its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on, of threads that are elsewhere
        child = os.fork()
    if child:
        return child
    code = 70
    with suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        code = work()
    os._exit(code)


def code_of(child) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def deliver_and_die(folder, url, when):
    """Die by SIGKILL before a notification is sent, or before its delivery is recorded."""
    history = History(folder)
    append = history.append

    def dying(*lines):
        if lines[-1]["event"] == "notified":
            os.kill(os.getpid(), signal.SIGKILL)
        append(*lines)

    history.append = dying
    notifier = Outbox([url], history, "run")
    if when == "before":
        notifier.deliver = lambda: os.kill(os.getpid(), signal.SIGKILL)
    record(history, notifier, *evaluation(alarm=["low"]))
    notifier.close(30)


@pytest.mark.parametrize(("when", "posts"), [("before", 1), ("after", 2)])
def test_a_kill_loses_none_and_repeats_at_most_with_the_same_id(receiver, tmp_path, when, posts):
    dead = forked(lambda: deliver_and_die(tmp_path, receiver.url, when))
    assert code_of(dead) == -signal.SIGKILL
    for _ in range(2):
        history = History(tmp_path)
        Outbox([receiver.url], history, "run").close(10)
        history.close()
        assert receiver.ids() == [history.lines[1]["notify"]["id"]] * posts
        assert len(delivered(history)) == 1


def test_only_the_first_of_equal_ends_is_notified(receiver, history):
    """`monitor --once` every hour does not repeat its reason, and says when it is gone."""
    notifier = Outbox([receiver.url], history, "run")
    for _ in range(3):
        record(history, notifier, {"event": "ended", "alarm": ["too low"], "code": 1})
    record(history, notifier, {"event": "ended", "alarm": ["lower"], "code": 1})
    record(history, notifier, *evaluation())
    notifier.close(10)
    assert [(post["kind"], post["alarm"]) for post in receiver.posts] == [
        *(("alarm", ["too low"]), ("alarm", ["lower"]), ("recovery", []))
    ]


BAD = [
    ("a URL such as", ["example.com/hidden"]),
    ("a URL such as", ["https:///hidden"]),
    (AUTHORIZATION, ["https://user:hidden@example.com/"]),
    ("one host, got a.com, b.com", ["https://a.com/hidden", "https://b.com/?hidden"]),
]


def test_urls_that_cannot_be_notified(monkeypatch):
    monkeypatch.setenv(AUTHORIZATION, SECRET)
    for reason, urls in BAD:
        with pytest.raises(ValueError, match=reason) as refused:
            check_destinations(urls)
        assert not any(secret in str(refused.value) for secret in ("hid", "s3cret"))


def test_names_of_receivers_show_no_secret():
    urls = ["https://a.com/x?y", "https://a.com/z", "https://a.com:8/"]
    shown = ["https://a.com/…", "https://a.com/…", "https://a.com:8"]
    names = [receiver_name(url) for url in urls]
    assert [name.partition(" ")[0] for name in names] == shown
    assert len(set(names)) == 3  # in any order of the URLs


def test_only_a_checkpoint_that_is_not_older_ends_an_alarm(receiver, history):
    notifier = Outbox([receiver.url], history, "run")
    for step, alarm in ((3, ["low"]), (2, []), (1, ["low"]), (2, [])):
        record(history, notifier, *evaluation(step, alarm=alarm))
    assert history.alarm()
    record(history, notifier, *evaluation(4))
    assert not history.alarm()
    notifier.close(10)
    assert [post["kind"] for post in receiver.posts] == ["alarm", "alarm", "recovery"]


def test_a_severe_finding_is_said_beside_the_row(capsys):
    worst, event = evaluation()
    found = [{"severity": "severe", "name": "slope", "text": "The gradient is cut off."}]
    clean = worst | {"name": "clean", "findings": found}
    Display("a: ").show([clean, worst | {"findings": found}, event | {"epoch": 0}])
    line = "lightning-rob: do not trust a: 1.ckpt: slope: The gradient is cut off."
    assert capsys.readouterr().err.splitlines() == [line]
