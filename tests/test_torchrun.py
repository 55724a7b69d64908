"""Two nodes of one process each, by torchrun or as SLURM starts them, do what one process does."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.forked import free_port
from tests.pieces import ROOT, python, records, shell, spec
from tests.tiny import arc, pgd, recipe, robust_eval, weights

NODES = ["--trainer.num_nodes=2", "--trainer.devices=1", "--rank_timeout=300"]
DDP = "--trainer.strategy=ddp_find_unused_parameters_true"


def by_torchrun(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    where = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return ["-m", "torch.distributed.run", *where, f"--node_rank={node}"], {}


def by_slurm(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """What `srun` puts into the environment of a task."""
    job = {"JOB_ID": "7", "JOB_NAME": "rob", "NODELIST": "127.0.0.1", "NNODES": "2", "NTASKS": "2"}
    task = {"NTASKS_PER_NODE": "1", "PROCID": str(node), "LOCALID": "0", "NODEID": str(node)}
    told = {f"SLURM_{name}": value for name, value in {**job, **task}.items()}
    return [], told | {"MASTER_PORT": str(port)}


def two_nodes(start, *args) -> None:
    """Run the command on both, as two machines would be told to."""
    port, running = free_port(), []
    for node in range(2):
        launcher, told = start(node, port)
        line = [sys.executable, *launcher, "-m", "lightning_rob", *map(str, args), DDP, *NODES]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | told
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(line, env=environment, cwd=ROOT, **options))
    errors = [process.communicate(timeout=600)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)


def figures(folder) -> dict:
    return {r["name"]: (r["n"], r["accuracy"]) for r in records(folder) if r["name"] != "clean"}


def attacked(folder):
    data = spec("tests.tiny.Blobs", test_size=33, eval_batch_size=7)
    suite = robust_eval({"apgd": pgd(random_start=True), "arc": arc(random_start=True)})
    return recipe(folder, data=data, **{"trainer__callbacks+": [suite]})


def one_and_two(folder, start) -> tuple[dict, dict]:
    """The figures of the same checkpoint on one process and on two nodes."""
    shell("fit", "--config", recipe(folder))
    checkpoint = folder / "run/version_0/checkpoints/epoch=3-step=16.ckpt"
    shell("test", "--config", attacked(folder / "one"), "--ckpt_path", checkpoint)
    two_nodes(start, "test", "--config", attacked(folder / "two"), "--ckpt_path", checkpoint)
    return figures(folder / "one"), figures(folder / "two")


@pytest.mark.slow
@pytest.mark.parametrize("start", [by_torchrun, by_slurm])
def test_two_nodes_give_the_figures_of_one_process(start, tmp_path):
    one, two = one_and_two(tmp_path, start)
    assert {name: n for name, (n, _) in one.items()} == {"apgd": 33, "arc": 33, "worst": 33}
    assert 0 < one["apgd"][1] < 1 and two == one


@pytest.mark.slow
def test_two_nodes_train_and_leave_one_checkpoint_that_one_process_tests(tmp_path):
    two_nodes(by_torchrun, "fit", "--config", attacked(tmp_path / "two"))
    (path,) = (tmp_path / "two/run/version_0/checkpoints").glob("*.ckpt")
    assert {r["n"] for r in records(tmp_path / "two")} == {32}
    assert all(torch.isfinite(tensor).all() for tensor in weights(path).values())
    last = {r["name"]: r["accuracy"] for r in records(tmp_path / "two") if r["epoch"] == 3}
    shell("validate", "--config", attacked(tmp_path / "one"), "--ckpt_path", path)
    assert {r["name"]: r["accuracy"] for r in records(tmp_path / "one")} == last


@pytest.mark.slow
def test_workers_of_ray_leave_the_records_of_one_process(tmp_path):
    """By the script of the page."""
    pytest.importorskip("ray")
    page = (ROOT / "docs/running.md").read_text()
    script = tmp_path / "on_ray.py"
    script.write_text(re.search(r"```python\n(import os\n.*?import ray.*?)```", page, re.S)[1])
    shell("fit", "--config", recipe(tmp_path))
    checkpoint, images = tmp_path / "run/version_0/checkpoints/epoch=3-step=16.ckpt", []
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    for name, start in {"one": ["-m", "lightning_rob"], "two": [script, 2]}.items():
        strategy = [] if name == "one" else [DDP]
        given = ["test", "--config", attacked(tmp_path / name), "--ckpt_path", checkpoint]
        python(*start, *given, *strategy, PYTHONPATH=path)
        images.append([p.read_bytes() for p in sorted((tmp_path / name).rglob("images/*.csv"))])
    assert images[0]
    assert images[0] == images[1]
    assert figures(tmp_path / "one") == figures(tmp_path / "two")
