"""The page and the Markdown that `lightning-rob report` makes of records."""

import json
import re
from html.parser import HTMLParser
from itertools import product

import pytest
import torch

from lightning_rob.cli import main
from lightning_rob.commands.report.blocks import NONE, html, markdown
from lightning_rob.commands.report.runs import Evaluations, attack_result, find_runs, read_run
from lightning_rob.commands.report.sections import run_section, votes
from lightning_rob.commands.specs import flat, inner_attacks, other_arguments, short, threat_text
from lightning_rob.plots import heat_map, save
from tests import tiny
from tests.pieces import python
from tests.tiny import refused

VOID = {"meta", "link", "img", "br", "line", "hr", "input"}
OBJECTIVE = "lightning_rob.objectives.expected_ce"


def spec(name, **arguments):
    return tiny.spec(f"lightning_rob.{name}", **arguments)


def record(kind, name, **fields):
    return {"schema": 1, "kind": kind, "name": name, "stage": "test"} | fields


LINF = spec("Threat", norm="linf", eps=8 / 255, bounds=[0.0, 1.0], relative=False)
L2 = spec("Threat", norm="l2", eps=0.5, bounds=[0.0, 1.0], relative=False)
HOSTILE = "<script>alert(1)</script>|*x*$\\frac$"


class Page(HTMLParser):
    """Fails on tags that do not balance; keeps what a browser would load, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.loads, self.ids, self.text, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for key, value in attrs if key in ("src", "href")]
        self.ids += [value for key, value in attrs if key == "id"]
        if tag == "img":
            assert dict(attrs)["alt"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def line(name, accuracy, stage="test", epoch=3, threat=LINF, **fields):
    attack = spec("PGD", threat=threat, steps=20, step_size=0.1, objective=OBJECTIVE)
    shared = record("accuracy", name, stage=stage, epoch=epoch, step=9, target="full_defense")
    shared |= {"seed": 5, "repeats": 1, "versions": {"torch": "2.99.1"}, "n": 400}
    shared |= {"accuracy": accuracy, "interval": [accuracy - 0.031, accuracy + 0.033]}
    worst = {"seconds": 0.0, "choice": "per-image minimum", "over": ["apgd", "arc"]}
    kinds = {"clean": {"seconds": 0.0}, "worst": worst}
    return shared | kinds.get(name, {"seconds": 1.5, "attack": attack, "threat": threat}) | fields


def evaluation(clean, apgd, arc, worst, **fields):
    names = ("clean", "apgd", "arc", "worst")
    found = zip(names, (clean, apgd, arc, worst), strict=True)
    return [line(name, accuracy, **fields) for name, accuracy in found]


def folder(path, lines, file="robust.jsonl", tail=""):
    path.mkdir(parents=True, exist_ok=True)
    (path / file).write_text("".join(json.dumps(fields) + "\n" for fields in lines) + tail)
    return path


def made(*folders, out=None):
    """(page parsed, its text, Markdown)."""
    out = out or folders[0] / "report.html"
    main(["report", *map(str, folders), "--out", str(out)])
    html = out.read_text()
    page = Page(html)
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.loads if link.startswith("#")} <= set(page.ids)
    assert all(link.startswith(("#", "data:")) for link in page.loads)
    assert not re.search(r"url\((?!#)|@import|<script", html)
    return page, " ".join(" ".join(page.text).split()), out.with_suffix(".md").read_text()


def rows(markdown):
    """The rows of all Markdown tables, each of as many cells as its table's heading."""
    found, width = [], 0
    for text in markdown.splitlines():
        if not text.startswith("| "):
            width = 0
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", text)[1:-1]]
        width = width or len(cells)
        assert len(cells) == width
        found.append(cells)
    return found


@pytest.fixture
def whole(tmp_path):
    lines = [
        *evaluation(0.701, 0.502, 0.403, 0.304, stage="val", epoch=0, n=50),
        *evaluation(0.712, 0.523, 0.434, 0.345, stage="val", epoch=1, n=50),
        *evaluation(0.723, 0.514, 0.405, 0.316, stage="val", epoch=2, n=50),
        *evaluation(0.861, 0.612, 0.557, 0.531),
    ]
    return folder(tmp_path / "run", lines)


def test_accuracies_of_the_records_are_in_both_files(whole):
    """The worst is the accuracy to cite."""
    page, text, markdown = made(whole)
    for number in ("86.1%", "61.2%", "55.7%", "53.1%", "50.0% … 56.4%", "34.5%", "43.4%"):
        assert number in text and number in markdown
    assert ["apgd", "full defense", "61.2%", "58.1% … 64.5%", "400", "1.5", "linf 8/255"] in rows(
        markdown
    )
    worst = ["**worst**", "**full defense**", "**53.1%**", "**50.0% … 56.4%**", "**400**"]
    assert [*worst, "", "**linf 8/255**"] in rows(markdown)
    assert "torch 2.99.1" in text and "evaluation seed 5" in text
    card = ["apgd", "full defense", "PGD", "linf", "8/255", "20", "0.1", "objective=expected_ce"]
    assert card in rows(markdown)
    assert "53.1% of 400 test images, in the worst case over apgd and arc" in text
    assert "| 1 | 71.2% | 52.3% | 43.4% | 34.5% |" in markdown
    assert page.tags.count("figure") == 1
    assert "Caution" not in text


FEW = {"n": 33, "plug_in": "callbacks/autoattack.yaml"}
KNOWN = {"accuracy": 0.345, "interval": [0.3, 0.39], "n": 380, "ball": "linf 8/255"}
VALUES = (0.9, 0.5, 0.4, 0.3)
SAID = {  # lines of a run -> what the page says of them
    "few images, a single attack": (
        [line("clean", 0.9, **FEW), line("apgd", 0.5, **FEW)],
        "only 33 images; apgd is the only attack; 50.0% of 33 test images under apgd alone; "
        "Add callbacks/autoattack.yaml, the plug-in for its kind of defense",
    ),
    "an attacker who knows the noise": (
        [line("clean", 0.9), line("apgd", 0.5), line("worst", 0.5, known_noise=KNOWN)],
        "34.5% withstand an attacker who knows the noise, within linf 8/255; 380 images",
    ),
    "no test, the last validation": (
        evaluation(*VALUES, stage="val", epoch=7),
        "Accuracy on the validation images at epoch 7; no test is recorded",
    ),
    "numbers that are missing": (
        [
            x | {"accuracy": None} if x["name"] in ("apgd", "worst") else x
            for x in evaluation(*VALUES, stage="val", epoch=0) + evaluation(*VALUES)
        ],
        "no number was recorded for apgd and worst",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_what_a_reader_should_know_is_said(case, tmp_path):
    lines, said = SAID[case]
    _, text, markdown = made(folder(tmp_path / "a/run", lines))
    assert [part for part in said.split("; ") if part not in text] == []
    assert "nan" not in (text + markdown).lower()
    if case.startswith("few"):
        assert "rec_suite" not in text and markdown.count("> **Caution:**") == 2


def test_a_half_written_line_and_foreign_files_do_no_harm(whole):
    with (whole / "robust.jsonl").open("a") as file:
        file.write('{"name": "apgd", "stage": "test", "accu')
    junk = ["12", "[]", "null", '{"schema": 1, "name": 3, "accuracy": "high"}', "{"]
    junk.append(json.dumps(line("apgd", 0.007) | {"schema": 2}))
    (whole / "other.jsonl").write_text("\n".join(junk))
    (whole / "binary.jsonl").write_bytes(bytes(range(256)))
    (whole / "config.yaml").write_text("model: [unclosed")
    _, text, _ = made(whole)
    assert "61.2%" in text
    assert "0.7%" not in text  # the schema is another one


def test_what_was_evaluated_again_counts_once():
    lines = [line("apgd", 0.1 + 0.1 * e, "val", e) for e in range(5)]
    resumed = [line("apgd", 0.75, "val", 2), line("apgd", 0.8, "val", 3)]
    evaluations = Evaluations(attack_result(fields) for fields in lines + resumed)
    series = evaluations.series()["apgd", "full_defense"]
    assert [(r.epoch, r.accuracy) for r in series] == [(0, 0.1), (1, 0.2), (2, 0.75), (3, 0.8)]
    assert [r.accuracy for r in evaluations.last()] == [0.8]


def test_hostile_names_are_text(tmp_path):
    places = product(("val", "test"), ("full defense", "<b>_bold_</b>"))
    lines = [line(HOSTILE, 0.5, stage=stage, target=target) for stage, target in places]
    lines.append(line("worst", 0.5, over=[HOSTILE], threat=spec("Threat", norm="<i>", eps="<i>")))
    run_folder = folder(tmp_path / "<img src=x onerror=alert(1)>", lines)
    (run_folder / "config.yaml").write_text("model: {class_path: '</pre><script>'}\n# ```\n")
    swept = line(HOSTILE, 0.25, value=1, variable=HOSTILE, target=HOSTILE)
    folder(run_folder, [swept], "sweep.jsonl")
    page, text, markdown = made(run_folder, out=tmp_path / "report.html")
    assert not {"script", "em", "u", "img"} & set(page.tags)
    assert HOSTILE in text
    assert "<script>" not in re.sub(r"````yaml.*?````", "", markdown, flags=re.DOTALL)
    assert "````yaml" in markdown
    rows(markdown)


def test_several_runs_are_compared_within_a_threat(tmp_path):
    a = folder(tmp_path / "logs/version_2", evaluation(0.9, 0.6, 0.5, 0.45))
    b = folder(tmp_path / "logs/version_10", evaluation(0.8, 0.7, 0.55, 0.5))
    c = folder(tmp_path / "logs/version_11", evaluation(0.7, 0.3, 0.2, 0.1, threat=L2))
    page, text, markdown = made(tmp_path / "logs", out=tmp_path / "x/all.html")
    assert [x.folder for x in find_runs([tmp_path / "logs", a])] == [a, b, c]
    head, _, first, second, third = rows(markdown)[:5]
    assert head[4:8] == ["clean", *(f"{name} (linf 8/255)" for name in ("apgd", "arc", "worst"))]
    assert head[8:] == [f"{name} (l2 0.5)" for name in ("apgd", "arc", "worst")]
    assert [row[0] for row in (first, second, third)] == [f"version_{i}" for i in (2, 10, 11)]
    assert [cell[:5] for cell in first[4:8]] == ["90.0%", "60.0%", "50.0%", "45.0%"]
    assert [cell[:5] for cell in second[4:]] == ["80.0%", "70.0%", "55.0%", "50.0%"] + [NONE] * 3
    assert third[5:8] == [NONE] * 3
    assert "does not mean the same" not in text
    assert "#run-3" in page.loads


def test_one_name_for_different_attacks_is_said_so(tmp_path):
    a = folder(tmp_path / "a", evaluation(0.9, 0.6, 0.5, 0.45))
    lines = evaluation(0.9, 0.5, 0.5, 0.45)
    lines[1]["attack"]["init_args"] |= {"steps": 50, "restarts": 5}
    b = folder(tmp_path / "b", lines)
    _, text, markdown = made(a, b, out=tmp_path / "report.html")
    assert "a and b differ in steps (20 and 50), restarts (none and 5)" in text
    marked = [name for name in rows(markdown)[0] if "†" in name]
    assert marked == ["apgd † (linf 8/255)", "worst † (linf 8/255)"]
    lines[1]["attack"]["class_path"] = "lightning_rob.attacks.APGD"
    _, text, _ = made(a, folder(tmp_path / "b", lines), out=tmp_path / "report.html")
    assert "a and b differ in method (PGD and APGD), steps (20 and 50)." in text


def test_pictures_are_shown_also_of_a_folder_that_has_nothing_else(tmp_path, whole):
    (drawn := tmp_path / "drawn").mkdir()
    for place, name in ((whole, "transfer_pgd"), (drawn, "sweep")):
        save(heat_map(torch.eye(2), "ab", "ab"), place / f"{name}.png")
    folder(drawn, [line("apgd", 0.5, value=8.0, variable="steps")], "sweep.jsonl")
    page, _, markdown = made(whole, drawn, out=tmp_path / "up/report.html")
    assert page.tags.count("img") == 2
    assert "![transfer pgd](<../run/transfer_pgd.png>)" in markdown
    assert "![sweep](<../drawn/sweep.png>)" in markdown


def test_the_verdict_on_overfitting_is_shown(tmp_path):
    run = folder(tmp_path / "run", evaluation(0.9, 0.5, 0.5, 0.45, stage="val"))
    said = [{"text": "old"}, {"text": "robust overfitting: <b>from</b> epoch 1 to 3"}]
    lines = [record("overfitting", "val/robust/worst") | one for one in said]
    folder(run, lines, "overfitting.jsonl")
    _, text, markdown = made(run)
    assert "val/robust/worst: robust overfitting: <b>from</b> epoch 1 to 3." in text
    assert "old" not in text and "robust overfitting" in markdown


def test_errors_are_one_line(tmp_path, whole, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no records in" in refused(capsys, "report", empty)
    (empty / "robust.jsonl").write_text(json.dumps(line("pgd", 0.5) | {"schema": 2}) + "\n")
    assert "have schema 2, this version reads 1" in refused(capsys, "report", empty)
    assert "there is no folder" in refused(capsys, "report", tmp_path / "nowhere")
    assert f"such as {whole}" in refused(capsys, "report", whole / "robust.jsonl")
    assert "ends in .html" in refused(capsys, "report", whole, "--out", tmp_path / "x.pdf")
    assert "RUN" in refused(capsys, "report")


def test_files_go_to_the_run_or_here(tmp_path, whole, capsys):
    """A folder without records among others is passed over."""
    main(["report", str(whole)])
    assert {whole / "report.html", whole / "report.md"} <= set(whole.iterdir())
    (empty := tmp_path / "empty").mkdir()
    main(["report", str(whole), str(empty)])
    assert (tmp_path / "report.html").is_file()
    told = capsys.readouterr()
    assert "Wrote report.md" in told.out and f"No run is recorded in {empty}" in told.err


def test_a_template_of_the_user_overrides_a_block(whole):
    template = whole / "mine.html"
    template.write_text('{% extends "page.html" %}{% block style %}p { color: red }{% endblock %}')
    main(["report", str(whole), "--template", str(template)])
    html = (whole / "report.html").read_text()
    assert "p { color: red }" in html and "61.2%" in html


def test_no_torch_is_needed(whole):
    code = f"import sys; from lightning_rob.cli import main; main(['report', {str(whole)!r}]); "
    code += "print({'torch', 'lightning'} & set(sys.modules))"
    assert python("-c", code).splitlines()[-1] == "set()"


def test_arguments_of_attacks_as_text(tmp_path):
    """Parts of an attack have a row each."""
    inner = [spec("ARC", threat=L2, steps=3), spec("ARC", threat=L2, steps=7)]
    shown = [line("arc", 0.5, attack=spec("Strongest", attacks=inner), threat=L2)]
    found = [row[:6] for row in rows(made(folder(tmp_path / "run", shown))[2])]
    assert ["arc", "full defense", "Strongest", "l2", "0.5", NONE] in found
    assert ["arc, part 2", "full defense", "ARC", "l2", "0.5", "7"] in found
    strongest = spec("Strongest", attacks=inner, margin=0.12345678, on=spec("Flip", p=1))
    assert inner_attacks(strongest)[:2] == inner
    expected = {"method": "Strongest", "margin": "0.1235"}
    for i, (name, arguments) in enumerate([("ARC", "3"), ("ARC", "7")], start=1):
        expected |= {f"part {i}.method": name, f"part {i}.steps": arguments}
    assert expected.items() <= flat(strongest).items()
    assert other_arguments(strongest) == "margin=0.1235"
    assert threat_text(LINF) == "linf 8/255" and threat_text("anything") == threat_text({}) == ""
    relative = spec("Threat", **L2["init_args"] | {"relative": True})
    assert threat_text(relative) == "l2 0.5 of the image's norm" and threat_text(L2) == "l2 0.5"
    texts = {8 / 255: "8/255", 0.99999: "0.99999", 0.1234567: "0.1235", 20: "20"}
    texts |= {float("nan"): "nan", None: "None", OBJECTIVE: "expected_ce"}
    assert [short(value) for value in texts] == list(texts.values())
    assert short([1, [0.5]]) == "(1, (0.5))"
    assert short(LINF) == "Threat(norm=linf, eps=8/255, bounds=(0.0, 1.0), relative=False)"


def test_what_an_earlier_process_tested_is_not_shown(tmp_path):
    old = [line("clean", 0.9, session="a"), line("apgd", 0.8, session="a")]
    new = [line("arc", 0.4, session="b")]
    (found,) = find_runs([folder(tmp_path, [*old, *new])])
    assert [r.name for r in found.evaluations.last()] == ["arc"]


def test_votes_are_a_table_by_rule_and_no_evaluations(tmp_path):
    shared = {"ensemble": "two", "members": 2, "n": 50, "interval": [0.1, 0.9]}
    lines = [
        record("voting_rule", name, dissimilarity=d, rule=rule, accuracy=share, **shared)
        for name, d in (("clean", 0.0), ("pgd", 0.3))
        for rule, share in (("RD", 0.25), ("MV", 0.5))
    ]
    run = read_run(folder(tmp_path, lines, "votes.jsonl"))
    assert not run.evaluations.by_stage
    *_, shown = votes(run.votes, 2)
    text = markdown([shown])
    assert "Accuracy on 50 test images" in text
    shares = ["25.0% (10.0% … 90.0%)", "50.0% (10.0% … 90.0%)"]
    assert rows(text) == [
        ["attack", "ensemble", "members", "dissimilarity", "RD", "MV"],
        ["---"] * 2 + ["--:"] * 4,
        ["clean", "two", "2", "", *shares],
        ["pgd", "two", "2", "0.300", *shares],
    ]


def test_an_audit_begins_with_its_warnings(tmp_path):
    finding = {"name": "gradients", "severity": "severe", "text": "Zero.", "advice": "Use BPDA."}
    fine = {"name": "numbers", "severity": "fine", "text": "All are numbers.", "advice": ""}
    pgd = {"name": "pgd", "accuracy": 0.75, "interval": [0.5, 0.9], "n": 20}
    audit = {"schema": 1, "kind": "audit", "title": "Single", "attacks": [pgd]}

    def shown(findings):
        (tmp_path / "audit.json").write_text(json.dumps(audit | {"findings": findings}, indent=1))
        return html(run_section(*find_runs([tmp_path]), "run", 1, tmp_path))

    page = shown([fine, finding])
    assert page.index("Zero. Use BPDA.") < page.index("75.0%") < page.index("All are numbers.")
    assert "Nothing suspicious" not in page
    assert "Nothing suspicious" in shown([fine])
