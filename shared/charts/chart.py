"""What every chart consists of: a picture, a sentence, and its data as a table."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from shared.charts.svg import element, joined

MAX_TABLE_CELLS = 2000


@dataclass(frozen=True)
class Table:
    """Data for people who cannot see the chart, or want the numbers. The first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __html__(self) -> str:
        """Return an HTML table with at most MAX_TABLE_CELLS cells; every n-th row if there are more."""
        step = max(1, -(-len(self.rows) * len(self.columns) // MAX_TABLE_CELLS))
        shown = [*self.rows[::-step]][::-1]  # counted from the end: the newest round is always there
        head = element("tr", *(element("th", name, scope="col") for name in self.columns))
        body = (
            element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:]))
            for row in shown
        )
        left_out = f"Every {step}th of {len(self.rows)} rows." if step > 1 else ""
        caption = element("caption", left_out) if left_out else ""
        return element("table", caption, element("thead", head), element("tbody", *body))


@dataclass(frozen=True)
class Chart:
    """A chart that templates show with `{{ chart }}`, as a figure with its title, its note and its data."""

    title: str
    svg: Markup
    table: Table
    note: str = ""  # how to read it, or what is left out

    @property
    def key(self) -> str:
        """The title as an id: keeps the table open when live.js replaces the section."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:60]

    def __html__(self) -> str:
        """Return the figure."""
        data = element(
            "details",
            element("summary", "Data as a table"),
            element("div", self.table.__html__(), class_="scroll", tabindex="0"),
            data_keep=f"data-{self.key}",
        )
        note = element("p", self.note, class_="note") if self.note else ""
        caption = element("figcaption", element("strong", self.title, class_="chart-title"), note)
        return element("figure", joined(caption, element("div", self.svg, class_="canvas"), data), class_="chart")
