# %% [markdown]
# # Monitor with an alarm
#
# Receive an alarm when fine-tuning makes a model less robust, though its clean accuracy stays high.
# This script trains for three epochs on adversarial images, and for two more on nearly clean
# images:

# %%
import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread

import matplotlib.pyplot as plt

folder = Path(mkdtemp())


def lightning_rob(*arguments):
    command = [sys.executable, "-m", "lightning_rob", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


checkpoints = "{class_path: ModelCheckpoint, init_args: {save_top_k: -1, every_n_train_steps: 30}}"
common = ["--config=madry_digits", "--test_after_fit=false", "--model.attack.steps=2"]
common += ["--model.attack.step_size=0.06", f"--trainer.callbacks+={checkpoints}"]
common += ["--trainer.logger.init_args.version=0"]
last = "logs/version_0/checkpoints/last.ckpt"
lightning_rob("fit", *common, "--trainer.max_epochs=3").check_returncode()
lightning_rob(
    "fit",
    *common,
    "--trainer.max_epochs=5",
    "--model.attack.threat.eps=0.001",
    f"--ckpt_path={last}",
).check_returncode()

# %% [markdown]
# The monitor evaluates each checkpoint under the same attack, and posts an alarm to a receiver,
# such as a chat or a pager. This receiver stores the messages:

# %%
received = []


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Receiver)
Thread(target=server.serve_forever, daemon=True).start()
monitor = lightning_rob(
    *("monitor", "logs/version_0", "--once", "--suite=pgd", "--trainer.callbacks.eps=0.1"),
    *("--alarm=robust/worst=0.40", "--drop=significant"),
    f"--notify=http://127.0.0.1:{server.server_port}",
)
server.shutdown()

history = Path(folder, "logs/version_0/monitor.jsonl").read_text().splitlines()
lines = [json.loads(line) for line in history]
figure, axis = plt.subplots(figsize=(6, 3.3), layout="constrained")
for attack, look in {"clean": "s--", "worst": "o-"}.items():
    found = [line for line in lines if line.get("name") == attack]
    axis.plot(
        [line["step"] for line in found], [line["accuracy"] for line in found], look, label=attack
    )
for message in received:
    axis.axvline(message["step"], color="#D55E00", linewidth=6, alpha=0.3)
axis.set(xlabel="training step", ylabel="accuracy", ylim=(0, 1))
axis.legend()
plt.savefig("alarm.png")
plt.show()

# %% [markdown]
# The orange bars are the alarms that the receiver got. This is the output of the monitor and its
# exit code:

# %%
alarms = [line for line in monitor.stderr.splitlines() if "alarm" in line]
print(monitor.stdout, *alarms, f"exit code {monitor.returncode}", sep="\n")

# %% [markdown]
# The receiver has these messages:

# %%
for message in received:
    print(message["kind"], message["checkpoint"], *message["alarm"], sep="\n  ")

# %% [markdown]
# Exit code 1 stops a pipeline. Each alarm is delivered at least once, even after a kill.
#
# Next: [monitor a deployed model](../monitor.md), with Prometheus, Kubernetes and a check for CI.
