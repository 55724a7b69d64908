"""A training that is made worse half-way, watched by a monitor, Prometheus and a webhook receiver.

    python benchmarks/monitor_story.py [--keep FOLDER]

Three fits write checkpoints to one folder: adversarial training, plain fine-tuning of its result,
adversarial training again. The receiver fails twice before it accepts anything. The script prints
what each of them saw, and fails unless the alarm fired in Prometheus by docs/deploy/alerts.yaml,
arrived exactly once, and recovered. It needs `prometheus` (Debian: apt-get install prometheus).
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import yaml

from tests.commands.test_notify import Receiver
from tests.tiny import ROOT

WORST = 'lightning_rob_accuracy{attack="worst"}'
THREAT = {"norm": "linf", "eps": 0.1}
STAGES = (("robust", 5), ("plain", 8), ("again", 13))  # each with the epoch that it ends before


def spec(name, **arguments):
    return {"class_path": name, "init_args": arguments}


def recipe(folder, plain, epochs):
    """Write the recipe of a stage."""
    attack = None if plain else spec("PGD", threat=THREAT, steps=5, step_size=0.03)
    adam = spec("torch.optim.Adam", lr=0.005)
    net = spec("SmallCNN", width=8)
    model = spec("AdversarialTraining", net=net, attack=attack, optimizer=adam)
    kept = spec("ModelCheckpoint", dirpath=str(folder / "run/checkpoints"), save_top_k=-1)
    trainer = {"accelerator": "cpu", "max_epochs": epochs, "callbacks+": [kept], "logger": False}
    trainer |= {"enable_progress_bar": False, "enable_model_summary": False}
    data = spec("Digits5k", batch_size=128, eval_batch_size=500, val_size=200)
    content = {"seed_everything": 0, "model": model, "data": data, "trainer": trainer}
    file = folder / f"until-{epochs}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def suite(folder):
    """Write the attacks of the monitor."""
    pgd = spec("PGD", threat=THREAT, steps=20, step_size=0.02)
    apgd = spec("APGD", threat=THREAT, steps=10)
    file = folder / "suite.yaml"
    file.write_text(yaml.safe_dump(spec("RobustEval", attacks={"pgd": pgd, "apgd": apgd})))
    return file


def program(*args):
    return [sys.executable, "-m", "lightning_rob", *map(str, args)]


def fit(folder):
    """Train all stages, each from the last checkpoint of the one before, once it is evaluated."""
    for name, epochs in STAGES:
        saved = (folder / "run/checkpoints").glob("*.ckpt")
        newest = max(saved, key=lambda file: file.stat().st_mtime, default=None)
        file = recipe(folder, name == "plain", epochs)
        resumed = ["--ckpt_path", newest] if newest else []
        subprocess.run(program("fit", "--config", file, *resumed), check=True)
        wait_until_evaluated(folder, epochs)
        print(f"{time.strftime('%H:%M:%S')} trained and evaluated {name}", flush=True)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def prometheus(folder, target, port):
    """Start Prometheus, with the rules of docs/deploy."""
    scraped = {"job_name": "monitor", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    content = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "docs/deploy/alerts.yaml")],
        "scrape_configs": [scraped],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(content))
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    return subprocess.Popen(["prometheus", *options])


def series(port, query, start):
    """Return what Prometheus recorded: (labels, [(time, value)])."""
    asked = urlencode({"query": query, "start": start, "end": time.time(), "step": 1})
    with urlopen(f"http://127.0.0.1:{port}/api/v1/query_range?{asked}", timeout=10) as reply:
        return [(s["metric"], s["values"]) for s in json.load(reply)["data"]["result"]]


def watched(folder):
    """Run everything; return the posts of the receiver and what Prometheus recorded."""
    start, over = time.time(), folder / "over"
    (folder / "run/checkpoints").mkdir(parents=True)
    target, port = free_port(), free_port()
    with Receiver() as receiver:
        receiver.statuses = [500, 503]
        options = ["--drop=significant", "--notify", receiver.url]
        options += [f"--serve={target}", "--every=1", "--until", over, "--trainer.accelerator=cpu"]
        monitor = subprocess.Popen(
            program("monitor", folder / "run", "--suite", suite(folder), *options)
        )
        server = prometheus(folder, target, port)
        try:
            fit(folder)
            (folder / "page.html").write_bytes(urlopen(f"http://127.0.0.1:{target}/").read())
            time.sleep(3)  # two scrapes
            found = {
                name: series(port, name, start) for name in ("ALERTS", "lightning_rob_alarm", WORST)
            }
            over.touch()
            print(f"exit code of the monitor: {monitor.wait(60)}")
        finally:
            monitor.kill()
            server.send_signal(signal.SIGTERM)
            server.wait(30)
        return receiver.posts, found


def history(folder, kind):
    """Return the events of a kind."""
    text = (folder / "run/monitor.jsonl").read_text()
    return [e for e in map(json.loads, text.splitlines()) if e.get("event") == kind]


def wait_until_evaluated(folder, count):
    """Wait for a number of evaluations."""
    while not (folder / "run/monitor.jsonl").exists() or len(history(folder, "evaluated")) < count:
        time.sleep(1)


def spans(recorded):
    """Return the seconds from the first to the last value of each alert."""
    return {
        (labels["alertname"], labels["alertstate"]): values[-1][0] - values[0][0]
        for labels, values in recorded
    }


def check(folder, posts, found):
    """Print what each of them saw; fail unless it is the same story."""
    for event in history(folder, "evaluated"):
        print(event["checkpoint"], event.get("drops", ""), *event["alarm"])
    for post in posts:
        print(post["status"], post["id"][:8], post["text"])
    print("Prometheus:", spans(found["ALERTS"]))
    ((_, values),), ((_, states),) = found[WORST], found["lightning_rob_alarm"]
    print("worst as scraped:", *dict.fromkeys(value for _, value in values))
    changes = "".join(state for state, _ in groupby(state for _, state in states))
    print("alarm as scraped:", changes)
    accepted = [post["id"] for post in posts if post["status"] == 204]
    wanted = [
        event["notify"]["id"]
        for kind in ("evaluated", "judged")
        for event in history(folder, kind)
        if "notify" in event
    ]
    assert [post["status"] for post in posts[:3]] == [500, 503, 204]
    assert sorted(accepted) == sorted(wanted), "each exactly once"
    kinds = [post["kind"] for post in posts if post["status"] == 204]
    assert "recovery" in kinds[kinds.index("alarm") :], kinds
    assert "010" in changes
    assert spans(found["ALERTS"])["RobustnessAlarm", "firing"] > 1
    assert any("fell from" in post["text"] for post in posts)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        parser.error("there is no prometheus: apt-get install prometheus")
    folder = options.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        check(folder, *watched(folder))
    finally:
        if not options.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
