"""Takes the pictures of docs/report.md from the committed page and from the L20's registry.

They shrink to a third where pngquant is installed (apt-get install pngquant), which makes them palette PNGs.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from chromium import launch_chromium
from sagegen.report.contents import make_page
from sagegen.report.page import render_page
from sagegen.report.sources import read_inputs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "report"
#: Name, page, width, color scheme, and the part that is shown: where it begins, its height.
SHOTS = (
    ("wide-light", "h200", 1440, "light", 0, 2560),
    ("middle-light", "h200", 768, "light", 0, 1500),
    ("narrow-dark", "h200", 320, "dark", 0, 1500),
    ("predicted", "l20", 768, "light", 0, 1500),
)


def take_pictures(browser: Any, pages: dict[str, Path]) -> None:
    for name, page_name, width, scheme, top, height in SHOTS:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.goto(pages[page_name].as_uri())
        clip = {"x": 0, "y": top, "width": width, "height": height}
        page.screenshot(path=FOLDER / f"{name}.png", clip=clip, full_page=True)
        page.close()
        if shutil.which("pngquant"):
            path = str(FOLDER / f"{name}.png")
            subprocess.run(["pngquant", "--force", "--strip", "--output", path, "48", path], check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, launch_chromium() as chromium:
        predicted = Path(folder) / "l20.html"
        inputs = read_inputs([ROOT / "tuned" / "l20.yaml"])
        predicted.write_text(render_page(make_page(inputs, None, "sagegen report tuned/l20.yaml")), encoding="utf-8")
        take_pictures(chromium, {"h200": FOLDER / "h200.html", "l20": predicted})
