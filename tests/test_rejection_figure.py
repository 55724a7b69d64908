import pytest

from lightning_rob.figures.rejection import Setting, rejection
from lightning_rob.plots import pixels

LIMITS = [i / 99 for i in range(100)]
FALLING = [1 - limit for limit in LIMITS]
SETTING = Setting("PGD", LIMITS, FALLING, [f**2 for f in FALLING], [limit / 2 for limit in LIMITS])


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_drawn(count):
    settings = [Setting(name, *list(vars(SETTING).values())[1:]) for name in "abc"[:count]]
    figure = rejection(settings, tau=0.25, error="error per image")
    assert [axes.get_title() for axes in figure.axes] == list("abc"[:count])
    for axes in figure.axes:
        of_all, of_z, error, mark = axes.get_lines()
        assert of_all.get_ydata() == pytest.approx([100 * f for f in FALLING])
        assert of_z.get_ydata() == pytest.approx([100 * f**2 for f in FALLING])
        assert error.get_ydata() == pytest.approx([50 * limit for limit in LIMITS])
        assert list(error.get_xdata()) == LIMITS
        assert set(mark.get_xdata()) == {0.25}
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[1:] == ["rejected of z", "error per image", "threshold 0.25"]
    assert pixels(figure, dpi=50).std() > 0.05


def test_without_a_mark_and_without_a_setting():
    assert len(rejection([SETTING]).axes[0].get_lines()) == 3
    with pytest.raises(ValueError, match="at least one setting"):
        rejection([])
