"""`lightning-rob recipes`: the list, one file, and a copy that runs."""

from lightning_rob.cli import main
from lightning_rob.commands.recipes import FOLDERS, shipped_files, summary
from lightning_rob.recipes.shipped import shipped_folder
from tests.tiny import refused


def test_every_file_is_listed_with_a_sentence(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    shown = " ".join(" ".join(lines).split())
    for folder, _ in FOLDERS.values():
        found = shipped_files(folder)
        assert found
        for name, path in found.items():
            sentence = summary(path)
            assert len(sentence) > 10 and f" {name} {sentence}" in shown


def test_a_file_is_printed_or_copied(tmp_path, capsys):
    main(["recipes", "demo"])
    content = (shipped_folder() / "configs/demo.yaml").read_text()
    assert capsys.readouterr().out == content
    main(["recipes", "demo", "arc.yaml", "digits_robust", "--copy"])
    assert (tmp_path / "demo.yaml").read_text() == content
    assert (tmp_path / "arc.yaml").exists() and (tmp_path / "digits_robust/images").is_dir()
    for args, message in (
        (["demo", "--copy"], "demo.yaml exists already"),
        (["demoo"], "there is no recipe, plug-in or network 'demoo'"),
        (["--copy"], "say which recipe to copy"),
    ):
        assert message in refused(capsys, "recipes", *args)
    assert (tmp_path / "demo.yaml").read_text() == content
