"""The trained networks of the package have the accuracies of their cards, and all commands run."""

import re
import shlex

import pytest
import torch

from lightning_rob import load
from lightning_rob.commands.recipes import shipped_files
from lightning_rob.data import Digits5k
from lightning_rob.metrics import robust_accuracy
from lightning_rob.runtime.errors import InputError
from tests.pieces import ROOT, lines_of
from tests.tiny import exit_code, refused

CARDS = shipped_files("zoo")
FEWER = {  # images, to be quick
    "test": ["--trainer.callbacks.max_images=40"],
    "audit": ["--images=10", "--queries=20"],
    "monitor": ["--trainer.callbacks.max_images=40"],
}


@pytest.mark.parametrize("name", CARDS)
def test_a_network_has_the_accuracies_of_its_card(name):
    folder = CARDS[name].parent
    records = lines_of(folder / "robust.jsonl")
    card = CARDS[name].read_text().replace("**", "")
    for record in records[1:]:  # the first is clean accuracy, of which the card shows the last
        assert f"| {record['name']} | full defense | {record['accuracy']:.1%} |" in card
    test = Digits5k().source(train=False)
    with torch.no_grad():
        scores = robust_accuracy(load(f"zoo:{name}")(test.images / 255), test.labels)
    low, high = records[0]["interval"]
    assert records[0]["name"] == "clean" and low <= float(scores.mean()) <= high


def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/index.md").read_text().partition("## Try it without training")[2]
    block = re.search(r"```bash\n(.*?)```", page, re.S)[1].replace("\\\n", "")
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "lightning-rob":
            code = exit_code(*words[1:], *FEWER.get(words[1], []))
            assert code == ("exit code 1" in line), line
    shown = capsys.readouterr()
    assert "alarm: checkpoints/last.ckpt: robust/worst is" in shown.err
    assert "robust" in (tmp_path / "report.html").read_text()


def test_there_is_no_such_network(capsys):
    with pytest.raises(InputError, match="there is no network zoo:none: zoo:digits_robust, zoo:d"):
        load("zoo:none")
    line = refused(capsys, "test", "--ckpt_path", "zoo:none")
    assert "there is no network zoo:none" in line
