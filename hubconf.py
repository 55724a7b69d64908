"""Entry points of `torch.hub`.

`torch.hub.load("OWNER/lightning-rob", "load", "last.ckpt")` returns the defense of a checkpoint,
without an installation of this package; its dependencies have to be installed.
"""

from lightning_rob import load, load_module

__all__ = ["load", "load_module"]
dependencies = [
    "torch",
    "torchvision",
    "lightning",
    "torchmetrics",
    "kornia",
    "jsonargparse",
    "bayes_opt",
]
