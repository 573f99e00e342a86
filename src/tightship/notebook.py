"""How answers are displayed in a notebook: HTML without scripts, styles or links, the same offline and reopened."""

from __future__ import annotations

from collections.abc import Container
from html import escape

from tightship.units import visible

__all__ = ["Shown"]


class Shown:
    """What prints itself in words and, in a notebook, as text that is escaped; with a picture where it has one."""

    def picture(self) -> str:
        """An SVG, or nothing."""
        return ""

    def _repr_html_(self) -> str:
        """The picture is an image: the styles of one that stands in the page would hold for all of it."""
        from base64 import b64encode

        text, drawn = escape(visible(str(self))), self.picture()
        if not drawn:
            return f"<pre>{text}</pre>"
        data = b64encode(drawn.encode()).decode()
        return f'<img alt="{text}" src="data:image/svg+xml;base64,{data}"><pre>{text}</pre>'

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, str]:
        """What a notebook keeps in its file: ``text/plain`` and ``text/html``."""
        kinds = {"text/plain": self.__str__, "text/html": self._repr_html_}
        return {
            kind: made()
            for kind, made in kinds.items()
            if (not include or kind in include) and (not exclude or kind not in exclude)
        }
