"""Read a page as a browser does: its elements, text and data."""

import json
from html.parser import HTMLParser


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        elements: each element's name and attributes.
        text: the text outside of scripts and styles, with single spaces.
        scripts: the text of each script; styles: of each style.
        data: the JSON of the curves.
    """

    def __init__(self, path):
        super().__init__()
        self.elements, self.scripts, self.styles, self._words, self._open = [], [], [], [], ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = " ".join(" ".join(self._words).split())
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open in ("script", "style"):
            (self.scripts if self._open == "script" else self.styles).append(data)
        else:
            self._words.append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def curve(self, name, run=0):
        """Return the points of a curve."""
        charts = [chart for chart in self.data["charts"] if chart["name"] == name]
        assert len(charts) == 1, [chart["name"] for chart in self.data["charts"]]
        return next(one for one in charts[0]["series"] if one["run"] == run)
