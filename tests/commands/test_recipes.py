"""`lightning-rob recipes`: the list, one file, and a copy that runs."""

import shutil

import pytest

from lightning_rob.cli import main
from lightning_rob.commands import recipes
from lightning_rob.commands.recipes import FOLDERS, shipped_files, summary
from lightning_rob.recipes.shipped import shipped_folder


def test_every_file_is_listed_with_a_sentence(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100  # a pipe has no width
    shown = " ".join(" ".join(lines).split())
    for folder, _ in FOLDERS.values():
        found = shipped_files(folder)
        assert found
        for name, path in found.items():
            sentence = summary(path)
            assert len(sentence) > 10
            assert f" {name} {sentence}" in shown


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


def test_a_copy_can_be_edited_where_the_package_is_read_only(tmp_path, monkeypatch):
    shipped, here = tmp_path / "shipped", tmp_path / "here"
    shutil.copytree(shipped_folder() / "zoo/digits_standard", shipped / "zoo/digits_standard")
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(recipes, "shipped_folder", lambda: shipped)
    parts = [shipped, *shipped.rglob("*")]
    modes = {part: part.stat().st_mode for part in parts}
    for part, mode in modes.items():
        part.chmod(mode & ~0o222)
    try:
        main(["recipes", "digits_standard", "--copy"])
    finally:
        for part, mode in modes.items():
            part.chmod(mode)
    copies = [here / "digits_standard", *(here / "digits_standard").rglob("*")]
    assert len(copies) == len(parts) - 2
    assert all(copy.stat().st_mode & 0o200 for copy in copies)
