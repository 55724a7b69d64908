"""The claims of the papers: tables, count and picture of docs/reproduction.md from one file.

    python benchmarks/claims.py

Reads benchmarks/papers/claims.yaml, where each claim has its verdict at the setting nearest to the
paper, and writes the parts of the page that stand between its comments `begin` and `end`, and
docs/images/claims.png. The page has three tables by what follows for a user, and by paper a block
of evidence for each claim.
"""

import hashlib
import json
import re
from pathlib import Path

import yaml
from matplotlib.lines import Line2D

from lightning_rob.plots import COLORS, blank

ROOT = Path(__file__).parents[1]
FILE, PAGE = ROOT / "benchmarks/papers/claims.yaml", ROOT / "docs/reproduction.md"
PICTURE = ROOT / "docs/images/claims.png"
PARTS = ("data", "network", "threat", "attack", "training")
VERDICTS = {  # colours of Okabe and Ito, and shapes for those who see no colours
    "holds": {"marker": "o", "color": COLORS[0]},
    "fails": {"marker": "X", "color": COLORS[1]},
    "open": {"marker": "D", "color": "0.35", "markerfacecolor": "white"},
}
GROUPS = {
    "look": "Defenses that look more robust than they are",
    "gain": "Does it make a defense more robust?",
    "attack": "Which attack to run",
}
PAPERS = ("ensembles", "transforms", "adaptive", "athena")
HEADS = ("claim", "nearest to the paper's setting", "where it turns", "what to do")
SIZES = (50, 500, 2000)  # seeds times images, of the dots in the legend
LARGEST = 12.0  # points: the last one's diameter


def read():
    """Return the claims, in the order of the page."""
    return yaml.safe_load(FILE.read_text())


def count(claims):
    """Return the sentence of the verdicts' numbers."""
    holds, fails, undecided = (sum(c["verdict"] == v for c in claims) for v in VERDICTS)
    single = sum(c["verdict"] == "holds" and c["seeds"] == 1 for c in claims)
    near = [len(c["same"]) for c in claims if c["verdict"] == "holds"]
    return (
        f"At the settings nearest to the papers {holds} of {len(claims)} claims hold, "
        f"{fails} fail, and {undecided} are open. Of the {holds}, {single} rest on one training: "
        f"an interval over images does not cover another training. Of the {holds}, "
        f"{sum(n <= 1 for n in near)} share at most one of the five parts of the paper's setting "
        f"(below the picture), and {sum(n >= 4 for n in near)} share four or five."
    )


def nearness(claim):
    return f"{len(claim['same'])} of {len(PARTS)}"


def table(claims):
    """Return a row for each claim."""
    rows = [f"| {' | '.join(HEADS)} |", "|---|---|---|---|"]
    for claim in claims:
        cells = [
            f"[{claim['claim']}](#{claim['id']})",
            f"**{claim['verdict']}** ({nearness(claim)}). {claim['setting']}",
            claim["turns"],
            claim["do"],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def evidence(claim):
    """Return the block of a claim, which a reader unfolds."""
    same, ours = ", ".join(claim["same"]) or "none", claim["ours"]
    measured = [f"- Ours: {ours[0]}."]
    if len(ours) > 1:
        measured = ["- Ours:", *(f"    - {part}." for part in ours)]
    lines = [
        f'<details id="{claim["id"]}" markdown="1">',
        f"<summary>{claim['claim']}: {claim['verdict']}</summary>",
        "",
        f"- Published: {claim['published']}.",
        *measured,
        *(f"- {claim[key]}" for key in ["note"] if key in claim),
        f"- As in the paper, at the setting nearest to it: {same}.",
        f"- Run: {claim['run']}.",
        "",
        "</details>",
    ]
    return "\n".join(lines)


def parts(claims):
    """Return the generated parts of the page by name."""
    of_group = {g: [c for c in claims if c["group"] == g] for g in GROUPS}
    of_paper = {p: [c for c in claims if c["paper"] == p] for p in PAPERS}
    tables = [f"### {GROUPS[g]}\n\n{table(some)}" for g, some in of_group.items()]
    found = {"count": count(claims), "tables": "\n\n".join(tables)}
    return found | {p: "\n\n".join(map(evidence, some)) for p, some in of_paper.items()}


def page(text, claims):
    """Return the page's text with its generated parts."""
    for name, part in parts(claims).items():
        begin, end = f"<!-- begin {name} -->\n\n", f"\n\n<!-- end {name} -->"
        text, times = re.subn(
            f"({re.escape(begin)}).*?({re.escape(end)})",
            lambda match, part=part: match[1] + part + match[2],
            text,
            flags=re.S,
        )
        if times != 1:
            raise ValueError(f"{PAGE.name} has {times} parts {name!r}, not one")
    return text


def drawn(claims):
    """Return a digest of everything that the picture shows, which it keeps."""
    keys = ("label", "group", "verdict", "same", "seeds", "images")
    shown = [[claim[key] for key in keys] for claim in claims]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def size(predictions):
    """Return a dot's diameter in points; its area grows with the root of seeds times images."""
    return max(3.5, LARGEST * (predictions / max(SIZES)) ** 0.25)


def picture(claims):
    """Draw a dot for each claim, by the number of parts that are as in the paper."""
    rows = len(claims) + 1.6 * len(GROUPS)
    figure = blank(4.9, 0.185 * rows + 0.9)
    axes, y, labels = figure.subplots(), 0.0, {}
    for group, title in GROUPS.items():
        y += 1.6
        place = {"xycoords": ("figure fraction", "data"), "va": "center", "in_layout": False}
        axes.annotate(title, (0.015, y - 0.95), weight="bold", fontsize=8.5, **place)
        for claim in (claim for claim in claims if claim["group"] == group):
            axes.axhline(y, color="0.9", linewidth=0.6, zorder=0)
            diameter = size(claim["seeds"] * claim["images"])
            style = {"markersize": diameter, "linestyle": "", **VERDICTS[claim["verdict"]]}
            axes.plot(len(claim["same"]), y, **style)
            labels[y] = claim["label"]
            y += 1
    axes.set_yticks(list(labels), labels.values(), fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.set(xlim=(-0.4, 5.4), ylim=(y - 0.3, 0), xticks=range(len(PARTS) + 1))
    axes.tick_params(axis="x", labelsize=8.5)
    axes.set_xlabel("how many of five are the paper's:\n" + ", ".join(PARTS), fontsize=8.5)
    keys = []
    for (verdict, style), dot in zip(VERDICTS.items(), SIZES, strict=True):
        number = sum(claim["verdict"] == verdict for claim in claims)
        keys.append(Line2D([], [], linestyle="", **style, label=f"{verdict} ({number})"))
        grey = {"marker": "o", "color": "0.6", "markersize": size(dot), "linestyle": ""}
        keys.append(Line2D([], [], **grey, label=f"{dot:,} seeds x images"))
    place = {"loc": "outside upper center", "ncols": 3, "frameon": False, "fontsize": 8}
    figure.legend(handles=keys, columnspacing=1.2, handletextpad=0.4, **place)
    return figure


def main():
    claims = read()
    PAGE.write_text(page(PAGE.read_text(), claims))
    picture(claims).savefig(PICTURE, dpi=150, metadata={"Claims": drawn(claims)})
    print(count(claims))


if __name__ == "__main__":
    main()
