"""No branch of a template is dead: each condition is met in some kernel that is run, and not met in another."""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2
import pytest
from jinja2 import nodes

import sagegen.render
import sagegen.templates
from relative_variants import default_relatives, ragged_variants, windowed_variants
from sagegen.probing.probes import PROBES
from sagegen.probing.source import render_probe
from sagegen.render import render

pytestmark = pytest.mark.emulator

TEMPLATES = Path(sagegen.templates.__file__).parent


def conditions_of(tree, name):
    """The conditions of a template by place: file, line, and a number, since a line may have several."""
    found = list(tree.find_all((nodes.If, nodes.CondExpr)))
    return {f"{name}:{node.lineno}-{number}": node for number, node in enumerate(found)}


class Recording(jinja2.Environment):
    """Notes what conditions were as templates are rendered."""

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        for place, node in conditions_of(tree, name).items():
            recorder = nodes.Name("record", "load", lineno=node.lineno)
            arguments = [nodes.Const(place, lineno=node.lineno), node.test]
            node.test = nodes.Call(recorder, arguments, [], None, None, lineno=node.lineno)
        return tree


@pytest.fixture(scope="module")
def found(variants):
    """What each condition was in the kernels that the emulator runs: {place: {False, True}}."""
    values = {}

    def record(place, value):
        values.setdefault(place, set()).add(bool(value))
        return value

    own = sagegen.render._environment()
    recording = Recording(
        loader=own.loader,
        undefined=own.undefined,
        trim_blocks=own.trim_blocks,
        lstrip_blocks=own.lstrip_blocks,
        keep_trailing_newline=own.keep_trailing_newline,
    )
    recording.globals |= {"read_include": functools.partial(sagegen.render._read_include, "cuda"), "record": record}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sagegen.render, "_environment", lambda: recording)
        for variant in variants:
            plain = render(variant.problem, variant.config)
        for problem, config in (*default_relatives(), *ragged_variants(), *windowed_variants()):
            render(problem, config)
        for probe in PROBES.values():
            render_probe(probe)
    assert plain.text == render(plain.problem, plain.config).text
    return values


def condition_places():
    environment = jinja2.Environment()
    for path in sorted(TEMPLATES.rglob("*.j2")):
        yield from conditions_of(environment.parse(path.read_text()), path.relative_to(TEMPLATES))


@pytest.mark.parametrize("place", list(condition_places()))
def test_every_condition_of_the_templates_is_met_and_not_met(place, found):
    assert found.get(place) == {False, True}
