"""The monitor's page over HTTP: what it shows, and what it refuses."""

import http.client
import socket
from contextlib import closing
from urllib.request import Request, urlopen

import pytest

from lightning_rob.commands.monitor import MonitorConfig
from lightning_rob.commands.monitor.history import History, timestamp
from lightning_rob.commands.monitor.page import Snapshot, newest_group
from lightning_rob.commands.monitor.publish import Publisher
from lightning_rob.commands.report.sections import checkpoints
from lightning_rob.runtime.errors import InputError
from tests.commands.test_notify import evaluation
from tests.commands.test_report import HOSTILE, Page

RUN = "logs/version_0"
OLD, NEW = "2026-01-02 03:04:05+00:00", "2026-01-03 03:04:05+00:00"


def event_of(step, alarm=(), note=None, **fields):
    """The lines of an evaluation, with a hostile name wherever a file may have one."""
    figure, event = evaluation(step, 0.25, alarm)
    known = {"stage": "monitor", "epoch": step, "target": "full_defense"}
    event |= {"epoch": step, "date": timestamp(), "checkpoint": f"{step} {HOSTILE}"}
    return figure | known, event | fields | ({"notify": note} if note else {})


@pytest.fixture
def served(tmp_path):
    """A page of an alarm delivered to one of two receivers, and a later checkpoint."""
    publisher = Publisher(MonitorConfig(tmp_path, serve=0))
    history = History(tmp_path)
    note = {"id": "1", "kind": "alarm", "to": ["https://a.com", "https://b.com"]}
    history.append(*event_of(1, [f"low {HOSTILE}"], note, date=OLD))
    history.append({"event": "notified", "id": "1", "to": "https://a.com", "date": NEW})
    history.append({"event": "broken", "checkpoint": "2.ckpt", "alarm": ["bad"], "date": NEW})
    group = newest_group(history, "s")
    waiting = {"https://a.com": 0, "https://b.com": 3}
    publisher.update(RUN, Snapshot(group, history, 7, waiting))
    yield publisher
    publisher.close()
    history.close()


def fetched(publisher, path="/", **headers):
    url = f"http://127.0.0.1:{publisher.server.server_port}{path}"
    with urlopen(Request(url, headers=headers), timeout=10) as reply:
        return reply.headers, reply.read().decode()


def text_of(html):
    return " ".join(" ".join(Page(html).text).split())


def test_it_shows_the_alarm_who_was_notified_the_queue_and_the_figures(served):
    """Names of files are text, and nothing is loaded."""
    headers, html = fetched(served)
    page = Page(html)
    assert "script" not in page.tags and all(link.startswith(("#", "data:")) for link in page.loads)
    assert headers["Refresh"] == "30" and "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    text = text_of(html)
    assert HOSTILE in text and f"ALARM since {NEW} 7 checkpoints wait for evaluation" in text
    assert "Alarm: 2.ckpt: bad" in text and f"https://a.com {NEW}, https://b.com not yet" in text
    assert "not sent: there was no --notify" in text
    assert "https://b.com has not accepted 3 of the notifications" in text
    assert "25.0% 15.0% … 35.0%" in text
    assert "days since the last evaluation" in text and "0 s since the last look" in text


def requested(publisher, path, method, host):
    client = http.client.HTTPConnection("127.0.0.1", publisher.server.server_port, timeout=10)
    with closing(client):
        client.request(method, path, headers={"Host": host})
        reply = client.getresponse()
        return reply, reply.read()


REQUESTS = [
    ("/", "POST", "localhost", 501),
    ("/monitor.jsonl", "GET", "localhost", 404),
    ("/%2e%2e/etc/passwd", "GET", "localhost", 404),
    ("/", "GET", "attacker.example", 403),
    ("/", "GET", "[::1]:80", 200),
    ("/healthz", "GET", "attacker.example", 200),
]


def test_only_fixed_paths_are_read_and_only_from_this_machine(served):
    found = [requested(served, *request)[0].status for *request, _ in REQUESTS]
    assert found == [status for *_, status in REQUESTS]
    reply, body = requested(served, "/", "HEAD", "localhost")
    assert (int(reply.headers["Content-Length"]) > 1000, body) == (True, b"")


def test_a_client_that_goes_or_stays_silent_disturbs_none(served, capsys, monkeypatch):
    monkeypatch.setattr("lightning_rob.commands.monitor.publish._Handler.timeout", 0.05)
    address = ("127.0.0.1", served.server.server_port)
    with socket.create_connection(address) as silent, socket.create_connection(address) as gone:
        gone.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        gone.close()
        silent.settimeout(10)
        assert silent.recv(1) == b""
    assert fetched(served)[1]
    assert "Traceback" not in capsys.readouterr().err


def test_it_shows_what_is_new_at_the_next_request(served):
    before = text_of(fetched(served)[1])
    served.snapshots[RUN].history.append(*event_of(3))
    after = text_of(fetched(served)[1])
    assert ("no alarm is open" in before, "no alarm is open" in after) == (False, True)
    assert after.index("recovery") < after.index("low ")


def test_several_models_have_a_section_each_and_an_overview(served, tmp_path):
    history = History(tmp_path / "other")
    history.append(*event_of(4))
    served.update("second", Snapshot(newest_group(history, "s"), history, 1, {}))
    page, text = Page(html := fetched(served)[1]), text_of(html)
    history.close()
    assert "logs/version_0 ALARM 7" in text and "second no alarm 1" in text
    assert len(set(page.ids)) == len(page.ids) and {"#run-0", "#run-1"} <= set(page.loads)
    assert {link[1:] for link in page.loads if link.startswith("#")} <= set(page.ids)


def test_models_of_one_file_are_in_the_order_of_their_evaluations(tmp_path):
    """Another training counts its steps anew."""
    for positions, order in (((0, 1), [9, 3]), ((9, 3), [3, 9])):
        with closing(History(tmp_path / str(order))) as history:
            for step, position in zip((9, 3), positions, strict=True):
                history.append(*event_of(step, position=position))
            _, curve, details = checkpoints(history.lines, 2)
        (line,) = curve.lines
        assert [x for x, _ in line.points] == [0, 600]
        latest = details.blocks[0].rows[0][0].text
        assert latest.startswith(str(order[-1]))


def test_a_template_of_the_user_takes_the_place_of_ours(served, tmp_path):
    place = tmp_path / "mine.html"
    place.write_text('{% extends "page.html" %}{% block style %}p { color: red }{% endblock %}')
    config = MonitorConfig(tmp_path, serve=0, template=place)
    with closing(Publisher(config)) as publisher:
        publisher.snapshots = served.snapshots
        html = fetched(publisher)[1]
    assert "p { color: red }" in html and "--ink" not in html.partition("<body>")[0]
    assert "ALARM" in text_of(html)
    place.write_text("{% for %}")
    with pytest.raises(InputError, match=f"the template {place} cannot be used: Expected"):
        Publisher(config)
