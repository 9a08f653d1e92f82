"""Kinds of option values that click does not have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click


class Duration(click.ParamType[float]):
    """Seconds from `90s`, `6m`, `1h30m`, or a plain number of minutes."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        if re.fullmatch(r"\d+(\.\d+)?", text):
            text += "m"
        if not re.fullmatch(r"(\d+(\.\d+)?[hms])+", text):
            self.fail(f"{value!r} is no duration; write 90s, 6m or 1h30m", param, ctx)
        seconds = sum(
            float(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text)
        )
        return seconds if seconds > 0 else self.fail("a budget must be more than nothing", param, ctx)


class Choices(click.ParamType[tuple[str, ...]]):
    """One or more of some words, separated by commas."""

    name = "list"

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.allowed = allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(word.strip() for word in str(value).split(",")))
        for word in words:
            if word not in self.allowed:
                self.fail(f"{word!r} is none of {', '.join(self.allowed)}", param, ctx)
        return words


class RegistryFile(click.ParamType[Path]):
    """Path of a registry file: `<folder>/<gpu>.yaml`; its cubins go to the folder of the same stem beside it."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.suffix != ".yaml" or path.is_dir():
            self.fail(f"{str(value)!r} is no registry file; write a path that ends in .yaml", param, ctx)
        return path


class DeviceCount(click.ParamType["int | None"]):
    """How many GPUs; `all` is None."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        text = str(value).strip().lower()
        if text == "all":
            return None
        if not text.isdecimal() or int(text) == 0:
            self.fail(f"{value!r} is no count of GPUs; write a number from 1 on, or all", param, ctx)
        return int(text)


class JournalFiles(click.ParamType[tuple[Path, ...]]):
    """Files that exist, separated by commas."""

    name = "files"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Path, ...]:
        if isinstance(value, tuple):
            return value
        paths = tuple(Path(word.strip()) for word in str(value).split(","))
        for path in paths:
            if not path.is_file():
                self.fail(f"there is no journal {str(path)!r}", param, ctx)
        return paths
