"""The page as one HTML file that needs nothing else, with every string escaped.

No script. The content security policy allows the one style sheet by its digest and nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.resources

import jinja2
from markupsafe import Markup

from sagegen.report.contents import Page
from sagegen.report.figure import Figure, format_tokens
from sagegen.report.text import show_text


def render_page(page: Page) -> str:
    """The HTML of a page: the same bytes for the same page."""
    style = _template_text("style.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    text: str = _environment().get_template("page.html.j2").render(
        page=page,
        style=Markup(style),  # our own text
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'",
        version=importlib.metadata.version("sagegen"),
    )  # fmt: skip
    return text


def _template_text(name: str) -> str:
    return importlib.resources.files("sagegen.report").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template_text),
        autoescape=True,
        finalize=show_text,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tokens"] = format_tokens
    environment.tests["figure"] = lambda value: isinstance(value, Figure)
    return environment
