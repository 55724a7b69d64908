"""Metrics of the monitor, read by the parsers of prometheus_client, and docs/deploy."""

import json
import os
import re
import subprocess
import time
from configparser import RawConfigParser
from urllib.error import HTTPError

import pytest
import yaml

from lightning_rob.cli.options import read_command_line
from lightning_rob.commands.monitor import MonitorConfig
from lightning_rob.commands.monitor.history import History, timestamp
from lightning_rob.commands.monitor.page import Snapshot, newest_group
from lightning_rob.commands.monitor.publish import Publisher
from lightning_rob.runtime.errors import InputError
from tests.commands.test_notify import evaluation
from tests.commands.test_page import fetched
from tests.tiny import ROOT

pytest.importorskip("prometheus_client")
from prometheus_client.openmetrics import parser as openmetrics

DEPLOY = ROOT / "docs/deploy"


def lines_of(step, alarm=()):
    figure, event = evaluation(step, 0.25, alarm)
    return figure, event | {"epoch": 0, "date": timestamp()}


@pytest.fixture
def published(tmp_path):
    """Metrics of a history with two evaluations, an alarm and a missed checkpoint."""
    publisher, history = Publisher(MonitorConfig(tmp_path, serve=0)), History(tmp_path)
    history.append(*lines_of(1))
    history.append(*lines_of(2, ["low"]))
    history.append({"event": "missed", "checkpoint": "3.ckpt"})
    group = newest_group(history, "s")
    publisher.update(str(tmp_path), Snapshot(group, history, 4, {"https://a.com": 2}))
    yield publisher
    publisher.close()
    history.close()


def samples(families):
    return {
        (s.name, s.labels.get("attack") or s.labels.get("destination")): s
        for family in families
        for s in family.samples
    }


def get(publisher, path, **headers):
    return fetched(publisher, path, **headers)[1]


def test_every_figure_is_served_with_its_interval(published, tmp_path):
    text = get(published, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    found = samples(openmetrics.text_string_to_metric_families(text))
    values = {key: sample.value for key, sample in found.items()}
    figures = {"accuracy": 0.25, "accuracy_low": 0.15, "accuracy_high": 0.35, "images": 8}
    for name, value in figures.items():
        assert values[f"lightning_rob_{name}", "worst"] == pytest.approx(value)
    assert values["lightning_rob_notifications_waiting", "https://a.com"] == 2
    expected = {"checkpoint_step": 2, "alarm": 1, "alarms_total": 1, "evaluations_total": 2}
    expected |= {"missed_total": 1, "broken_total": 0, "queue_length": 4, "checkpoint_info": 1}
    assert {k: values[f"lightning_rob_{k}", None] for k in expected} == expected
    age = time.time() - values["lightning_rob_last_evaluation_timestamp_seconds", None]
    assert 0 <= age < 60
    assert {s.labels["run"] for s in found.values()} == {str(tmp_path)}
    info = found["lightning_rob_checkpoint_info", None].labels
    assert (info["checkpoint"], info["suite"]) == ("2.ckpt", "s")


def test_health_is_that_of_the_last_look(published):
    hangs = "the monitor does not look into its folder any more"
    assert json.loads(get(published, "/healthz"))["healthy"]
    assert hangs not in get(published, "/")
    published.looked_at -= published.limit
    assert hangs in get(published, "/")
    with pytest.raises(HTTPError) as failed:
        get(published, "/healthz")
    assert failed.value.code == 503
    failed.value.close()


def test_a_port_in_use(published, tmp_path):
    port = published.server.server_port
    with pytest.raises(InputError, match=f"--serve {port} on 127.0.0.1 cannot be used"):
        Publisher(MonitorConfig(tmp_path, serve=port))


def commands():
    """The monitor's command line in each file of docs/deploy."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    deployment = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())
    unit = RawConfigParser(strict=True)
    unit.optionxform = str
    unit.read(DEPLOY / "lightning-rob-monitor.service")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    service = unit["Service"]["ExecStart"].split()[1:]
    return [compose["services"]["monitor"]["command"], container["args"], service]


def test_deployed_commands_parse(tmp_path):
    for command, _, *args in commands():
        assert command == "monitor"
        line = read_command_line("monitor", str(tmp_path), *args)
        config = line.options
        assert config.limits == {"robust/worst": 0.4}
        assert (config.serve, config.level) == (9108, 0.05)
        own = {arg.partition("=")[0].rstrip("+") for arg in line.args} - {"--trainer.accelerator"}
        assert own <= {f"--{name}" for name in MonitorConfig.__dataclass_fields__}


def test_the_action_passes_its_arguments_on(tmp_path):
    """The shell of the action calls a program that notes its arguments and writes a record."""
    further = "--model=mine.Net\n  --trainer.callbacks.eps=0.1\n"
    action = yaml.safe_load((DEPLOY / "action.yml").read_text())
    evaluate, _ = action["runs"]["steps"]
    program = tmp_path / "lightning-rob"
    program.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" > args; for last; do :; done\n'
        'mkdir -p "${last#*=}/images"; touch "${last#*=}/images/test-pgd.csv"\n'
    )
    program.chmod(0o755)
    given = {"CHECKPOINT": "my model.ckpt", "SUITE": "pgd", "ARGUMENTS": further}
    assert given.keys() == evaluate["env"].keys()
    given |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_OUTPUT": "out", "TMPDIR": "."}
    line = ["bash", "-e", "-o", "pipefail", "-c", evaluate["run"]]
    subprocess.run(line, env=given, cwd=tmp_path, check=True)
    args = (tmp_path / "args").read_text().splitlines()
    start = ["test", "--ckpt_path", "my model.ckpt", "--trainer.callbacks+=pgd", *further.split()]
    assert args[: len(start) + 1] == [*start, "--trainer.accelerator=cpu"]
    assert (tmp_path / "out").read_text().endswith("/images/test-pgd.csv\n")


def test_dashboard_and_rules_name_metrics_that_exist(published):
    text = (DEPLOY / "alerts.yaml").read_text()
    rules = [rule["expr"] for rule in yaml.safe_load(text)["groups"][0]["rules"]]
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    asked = rules + [target["expr"] for panel in panels for target in panel["targets"]]
    names = set(re.findall(r"lightning_rob_\w+", " ".join(asked)))
    assert len(names) > 10
    assert names <= set(re.findall(r"^(lightning_rob_\w+)", get(published, "/metrics"), re.M))
