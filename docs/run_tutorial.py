"""Run a tutorial cell by cell; write what each cell printed and drew as JSON."""

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any


def read_cells(text: str) -> list[tuple[str, str]]:
    """Return the cells of a script in the percent format, ("markdown" or "code", text)."""
    found = []
    for head, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*(?:\n|$))*)", text, re.M):
        if "[markdown]" in head:
            found.append(("markdown", re.sub(r"^# ?", "", body, flags=re.M).strip()))
        else:
            found.append(("code", body.strip()))
    return found


def run(script: Path) -> list[dict[str, Any]]:
    """Return the outputs of each cell: "text", and the "pictures" as PNG in hexadecimal."""
    import matplotlib.pyplot as plt

    pictures: list[str] = []

    def show() -> None:
        for number in plt.get_fignums():
            file = io.BytesIO()
            plt.figure(number).savefig(file, dpi=130, bbox_inches="tight")
            pictures.append(file.getvalue().hex())
        plt.close("all")

    plt.show = show
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for kind, text in read_cells(script.read_text(encoding="utf-8")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if kind == "code":
                exec(compile(text, str(script), "exec"), namespace)
        outputs.append({"text": printed.getvalue(), "pictures": list(pictures)})
        pictures.clear()
    return outputs


if __name__ == "__main__":
    os.environ |= {"MPLBACKEND": "agg", "COLUMNS": "96"}
    Path(sys.argv[2]).write_text(json.dumps(run(Path(sys.argv[1]))), encoding="utf-8")
