"""The figures: each number and image in its place, readable."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from lightning_rob import plots


def contrast(color, shade):
    """The contrast ratio of WCAG 2."""
    light = []
    for rgb in (to_rgb(color), shade[:3]):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_heat_map_says_each_number_in_its_place_and_readably():
    values = torch.linspace(0, 1, 12).reshape(3, 4)
    figure = plots.heat_map(values, list("abc"), list("wxyz"), "a title")
    axes = figure.axes[0]
    image = axes.images[0]
    texts = {text.get_position(): text for text in axes.texts}
    assert len(texts) == 12
    for i in range(3):
        for j in range(4):
            text = texts[j, i]
            assert text.get_text() == f"{100 * values[i, j]:.1f}"
            shade = image.cmap(image.norm(100 * float(values[i, j])))
            assert contrast(text.get_color(), shade) > 4.2
    assert axes.get_xlabel() == "attacked member"
    assert axes.get_ylabel() == "predicting member"
    assert [label.get_text() for label in axes.get_xticklabels()] == list("wxyz")
    assert figure.get_suptitle() == "a title"


def test_the_convergence_figure_never_falls():
    figure = plots.convergence([0.5, None, 0.3, 0.7, 0.6], "val/robust/pgd")
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["best so far"].get_ydata()) == [0.5, 0.5, 0.7, 0.7, 0.7]
    assert list(lines["trials"].get_xdata()) == [0, 2, 3, 4]
    assert axes.get_ylabel() == "val/robust/pgd"


def case(label=1, channels=3, members=2, eps=0.1):
    generator = torch.Generator().manual_seed(label)
    clean = 0.2 + 0.6 * torch.rand(channels, 6, 6, generator=generator)
    classes = torch.arange(members) % 2
    shown = []
    for part in (classes, classes + 1):
        image = clean + eps * torch.rand(clean.shape, generator=generator)
        shown.append(plots.MemberPredictions(image, part, 0.5 + 0.1 * classes))
    return plots.GalleryRow(label, clean, *shown)


@pytest.mark.parametrize("channels", [1, 3])
def test_figure_shows_the_images_and_the_amplified_change(channels):
    cases = [case(1, channels), case(2, channels, eps=0.05)]
    figure = plots.gallery(cases, ("one", "two"))
    grid = np.reshape(figure.axes, (2, 7))
    factor = plots.amplification(cases)
    assert 4.9 < factor < 5.6
    for row, images_shown in zip(grid, cases, strict=True):
        pictures = {0: images_shown.clean, 2: images_shown.weak.image, 5: images_shown.strong.image}
        pictures[1] = 0.5 + factor * (images_shown.weak.image - images_shown.clean)
        pictures[4] = 0.5 + factor * (images_shown.strong.image - images_shown.clean)
        for place, picture in pictures.items():
            drawn = torch.tensor(np.asarray(row[place].images[0].get_array())).float()
            expected = picture.clamp(0, 1).permute(1, 2, 0).reshape(drawn.shape)
            torch.testing.assert_close(drawn, expected)
    heads = [axes.get_title() or axes.get_title(loc="left") for axes in grid[0]]
    change = f"change × {factor:g}"  # noqa: RUF001
    assert heads == ["clean", *(change, "one", "member: class"), *(change, "two", "member: class")]


def test_figure_says_what_each_member_classes():
    names = ["north", "east", "south"]
    figure = plots.gallery([case(1)], ("one", "two"), names, "a title")
    grid = np.reshape(figure.axes, (1, 7))
    assert grid[0, 0].get_ylabel() == "east"
    said = [[text.get_text() for text in grid[0, place].texts] for place in (3, 6)]
    assert said == [["✗ 1: north, 50%", "✓ 2: east, 60%"], ["✓ 1: east, 50%", "✗ 2: south, 60%"]]
    assert figure.get_suptitle() == "a title"


def test_curves_show_accuracy_and_interval_at_each_value():
    line = plots.Curve("pgd", [2.0, 1.0], [0.25, 0.5], [(0.2, 0.3), (0.4, 0.6)])
    axes = plots.curves([line], "eps", "accuracy").axes[0]
    assert axes.lines[0].get_xydata().tolist() == [[1.0, 50.0], [2.0, 25.0]]
    band = axes.collections[0].get_paths()[0].vertices
    assert {(1.0, 40.0), (1.0, 60.0), (2.0, 20.0), (2.0, 30.0)} <= set(map(tuple, band.tolist()))


def test_bars_say_accuracies_and_intervals():
    figure = plots.bars(["clean", "worst"], [0.9, 0.0], [(0.8, 0.95), (0.0, 0.2)])
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["clean\n90.0", "worst\n0.0"]
    (errors,) = axes.collections
    ends = [(line[0, 1], line[1, 1]) for line in errors.get_segments()]
    assert ends == [pytest.approx((80, 95)), pytest.approx((0, 20))]
