"""Image classifiers of the package transformers, as the Hugging Face hub has them."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_rob.nets.hub import CONFIG
from lightning_rob.nets.normalize import with_channels

PROCESSOR = "preprocessor_config.json"


def is_classifier(folder: Path) -> bool:
    """Return whether the `config.json` of a folder names an image classifier of transformers."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    named = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(named, list) and any("ForImageClassification" in str(one) for one in named)


class TransformersNet(nn.Module):
    """Image classifier of transformers behind its own preprocessing, for images in [0, 1].

    Its processor resizes, crops and normalises the images as `preprocessor_config.json` says, and
    attacks go through it: they change the pixels of the images as they are given. No code of the
    folder is run.

    Args:
        folder: config.json, model.safetensors and preprocessor_config.json.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: the folder has no preprocessing.
        ValueError: the processor passes no gradient to the pixels.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        try:
            from transformers import AutoImageProcessor, AutoModelForImageClassification
        except ImportError as error:
            raise ImportError(
                'classifiers of transformers need it: pip install "lightning-rob[hub]"'
            ) from error
        if not (folder / PROCESSOR).is_file():
            raise FileNotFoundError(
                f"{folder} has no {PROCESSOR}: save the processor beside the network, "
                "processor.save_pretrained(folder), or give evaluate the network and a preprocess"
            )
        local = {"local_files_only": True, "trust_remote_code": False}
        self.processor = AutoImageProcessor.from_pretrained(folder, **local)
        self.net = AutoModelForImageClassification.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, **local
        )
        self.channels = int(getattr(self.net.config, "num_channels", 3))
        probe = torch.zeros(1, self.channels, 64, 64, requires_grad=True)
        if not self.pixels(probe).requires_grad:
            raise ValueError(
                f"{type(self.processor).__name__} of {folder} passes no gradient to the pixels: "
                "give evaluate the network and a differentiable preprocess in its place"
            )

    def pixels(self, x: Tensor) -> Tensor:
        """Return what the network sees of the images [B, C, H, W]."""
        x = 255 * with_channels(x, self.channels)  # the processor rescales by 1/255 or its own
        layout = {"input_data_format": "channels_first", "return_tensors": "pt"}
        return self.processor(images=x, device=x.device, **layout)["pixel_values"]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.pixels(x)).logits

    def extra_repr(self) -> str:
        return f"preprocessing={self.processor.to_dict()}"
