"""The command that attacks a checkpoint by what its defense calls for."""

import pytest

from lightning_rob import load_callbacks
from lightning_rob.callbacks import robust_eval
from tests.pieces import spec
from tests.tiny import recipe, run


def test_the_command_prints_the_trail_and_writes_a_plug_in(trained, tmp_path, monkeypatch, capsys):
    net = spec("tests.audit.planted.Rounding", width=16)
    file = recipe(tmp_path, **{"model__init_args__net": net, "trainer__callbacks+": []})
    args = ["--config", file, "--ckpt_path", trained]
    search = ["attack", *args, "--images=10", "--passes=800", "--eps=0.1"]
    with monkeypatch.context() as patch:  # an interruption after the search
        patch.setattr(robust_eval, "append_records", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(*search)
    run(*search)
    out = capsys.readouterr().out
    assert "Continuing. Images scored already: auto 10." in out
    assert "Radius: linf 0.1, as --eps says\n" in out and "rounding operations" in out
    assert "slopes through rounding" in out
    (found,) = tmp_path.rglob("found.yaml")
    assert f"--trainer.callbacks+={found}" in out
    (plugin,) = load_callbacks(str(found))
    run("test", *args, f"--trainer.callbacks+={found}")
    assert "auto" in plugin.attacks and "auto" in capsys.readouterr().out
    run("attack", *args, "--images=10", "--passes=100", "--eps=0.1")
    assert "Not searched: " in capsys.readouterr().out
