"""The command that attacks a checkpoint by what its defense calls for."""

from lightning_rob import load_callbacks
from tests.pieces import spec
from tests.tiny import recipe, run


def test_the_command_prints_the_trail_and_writes_a_plug_in(trained, tmp_path, capsys):
    net = spec("tests.audit.planted.Rounding", width=16)
    file = recipe(tmp_path, **{"model__init_args__net": net, "trainer__callbacks+": []})
    args = ["--config", file, "--ckpt_path", trained]
    run("attack", *args, "--images=10", "--passes=800", "--eps=0.1")
    out = capsys.readouterr().out
    assert "Radius: linf 0.1, as --eps says\n" in out and "rounding operations" in out
    assert "slopes through rounding" in out
    (found,) = tmp_path.rglob("found.yaml")
    assert f"--trainer.callbacks+={found}" in out
    (plugin,) = load_callbacks(str(found))
    run("test", *args, f"--trainer.callbacks+={found}")
    assert "auto" in plugin.attacks and "auto" in capsys.readouterr().out
    run("attack", *args, "--images=10", "--passes=100", "--eps=0.1")
    assert "Not searched: " in capsys.readouterr().out
