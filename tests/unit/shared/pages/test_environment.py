import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from shared.pages.environment import STATIC, asset, environment, moment, relative


def test_templates_escape_names_and_refuse_missing_variables(tmp_path: Path) -> None:
    (tmp_path / "name.html").write_text("<p>{{ name }}</p>")
    template = environment(tmp_path).get_template("name.html")
    assert template.render(name="<script>") == "<p>&lt;script&gt;</p>"
    with pytest.raises(UndefinedError):
        template.render()


def test_what_is_not_known_is_shown_as_a_dash(tmp_path: Path) -> None:
    (tmp_path / "value.html").write_text("{{ value|percent }} {{ value|moment(5) }}")
    assert environment(tmp_path).get_template("value.html").render(value=None) == "– –"


def test_moments_are_relative_with_the_exact_time_on_hover() -> None:
    assert relative(1000, 1030) == "just now"
    assert relative(1000, 1000 + 7200 + 59) == "2 h ago"
    assert relative(1300, 1000) == "in 5 min"
    assert 'title="1970-01-01 00:16:40 UTC"' in moment(1000, 1030)


def test_addresses_of_static_files_name_their_version() -> None:
    assert re.fullmatch(r"/static/pages/pages\.css\?v=[0-9a-f]{12}", asset("pages.css"))


def test_styles_load_nothing_from_elsewhere() -> None:
    for file in STATIC.iterdir():
        assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", file.read_text()), file


def _luminance(color: str) -> float:
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colors_have_the_contrast_of_wcag_aa(theme: int) -> None:
    colors: dict[str, str] = {}
    for name in ("pages.css", "charts.css"):
        rules = re.findall(r":root \{(.*?)\}", (STATIC / name).read_text(), re.DOTALL)
        colors |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", rules[theme]))
    grounds = ("ground", "surface", "raised")
    text = [(name, ground) for name in ("text", "muted", "accent", "bad") for ground in grounds]
    text += [(name, f"{name}-soft") for name in ("accent", "good", "warn", "bad")] + [("on-accent", "accent")]
    text += [("on-low", f"q{shade}") for shade in range(5)]
    text += [("on-high", f"q{shade}") for shade in range(6, 9)]
    text.append(("on-high" if theme else "on-low", "q5"))
    for name, ground in text:
        assert _contrast(colors[name], colors[ground]) >= 4.5, (name, ground)
    graphics = [(name, "surface") for name in ("c1", "c2", "c3", "c4", "control", "good", "training", "late")]
    for name, ground in graphics:
        assert _contrast(colors[name], colors[ground]) >= 3, (name, ground)
