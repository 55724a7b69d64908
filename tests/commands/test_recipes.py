"""`lightning-rob recipes`: the list, one file, and a copy that runs."""

import subprocess
import sys

import pytest

from lightning_rob.cli import main
from lightning_rob.commands.recipes import FOLDERS, first_sentence, shipped_files, summary
from lightning_rob.shipped import shipped_folder


def test_every_file_is_listed_with_a_sentence(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["recipes"])
    shown = capsys.readouterr().out
    for folder, _ in FOLDERS.values():
        found = shipped_files(folder)
        assert found
        for name, path in found.items():
            sentence = summary(path)
            assert len(sentence) > 10
            assert [x for x in shown.splitlines() if f" {name} " in x and sentence[:20] in x]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# PGD, 20 steps.\nclass_path: PGD\n", "PGD, 20 steps"),
        ("# RT (Raff et al. 2019) on\n# digits. It is small.\n", "RT (Raff et al. 2019) on digits"),
        ("# DENT by Chen et al. (2022). It adapts.\n", "DENT by Chen et al. (2022)"),
        ("# DENT: pass its checkpoint.\n", "DENT"),
        ("model: x\n", ""),
    ],
)
def test_the_first_sentence(text, sentence):
    assert first_sentence(text) == sentence


def test_a_file_is_printed_or_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["recipes", "demo"])
    content = (shipped_folder() / "configs/demo.yaml").read_text()
    assert capsys.readouterr().out == content
    main(["recipes", "demo", "arc.yaml", "--copy"])
    assert (tmp_path / "demo.yaml").read_text() == content
    assert (tmp_path / "arc.yaml").exists()
    for args, message in (
        (["demo", "--copy"], "demo.yaml exists already"),
        (["demoo"], "there is no recipe, plug-in or network 'demoo'"),
        (["--copy"], "say which recipe to copy"),
    ):
        with pytest.raises(SystemExit):
            main(["recipes", *args])
        assert message in capsys.readouterr().err
    assert (tmp_path / "demo.yaml").read_text() == content


def test_it_needs_no_torch():
    code = "import sys; from lightning_rob.cli import main; main(['recipes', 'demo']); "
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
