"""One dimension of a search space, how it is spelled in names, and the dimensions that all families have."""

from __future__ import annotations

from dataclasses import dataclass

from sagegen.errors import UnknownNameError

#: Of a parameter.
Value = int | float | str


@dataclass(frozen=True, slots=True)
class Param:
    """One dimension of a space.

    Attributes:
        name: field name in the config.
        label: prefix of its value in a config's name.
        values: what may be tried, in order: neighbours of a value are its neighbours here.
        doc: what it does, for `sagegen show --space` and the docs.
        neutral: a value that renders what was rendered before the parameter came, and that names leave out. A
            parameter that is added with one changes no older config's name or text, and so makes no entry stale.
    """

    name: str
    label: str
    values: tuple[Value, ...]
    doc: str
    neutral: Value | None = None

    def spell(self, value: Value) -> str:
        """The field of a config's name for `value`; a decimal point is a `p`, since names are C++ identifiers."""
        return f"{self.label}{value}".replace(".", "p")


DELTA = Param("delta", "ds", ("f32", "f16"), "type of delta S in memory; f16 has a scale per row", "f32")
ROTATE = Param("rotate", "ro", ("no", "yes"), "Q and K less their means are rotated by a Hadamard matrix", "no")
BALANCE = Param(
    "balance", "bl", ("no", "yes"), "channels of Q and K less their means are scaled to one size, before rotation", "no"
)
QK_DOC = "operands of Q·K^T: INT8, which carry INT4 values too, {}FP8"


def mean_span(*spans: int) -> Param:
    doc = "query rows whose mean is subtracted, and comes back as delta S; 0: Q is not smoothed"
    return Param("mean_span", "ms", (0, *spans), doc, 0)


def spell_name(family: str, params: tuple[Param, ...], values: dict[str, Value]) -> str:
    """Family and fields joined by underscores; neutral values are left out."""
    return "_".join([family, *(p.spell(values[p.name]) for p in params if values[p.name] != p.neutral)])


def parse_fields(params: tuple[Param, ...], parts: list[str]) -> dict[str, Value]:
    """Values by parameter of a name's fields, which stand in the parameters' order.

    Raises:
        UnknownNameError: a field is missing, misspelled, out of place, or one too many.
    """
    values: dict[str, Value] = {}
    left = list(parts)
    for param in params:
        by_text = {param.spell(value): value for value in param.values}
        if left and left[0] in by_text:
            values[param.name] = by_text[left.pop(0)]
        elif param.neutral is not None:
            values[param.name] = param.neutral
        else:
            found = f"field {left[0]!r} does not name" if left else "name ends before"
            raise UnknownNameError(f"config {found} a {param.name}", f"use one of {', '.join(by_text)}")
    if left:
        raise _explain_field(params, left[0])
    return values


def _explain_field(params: tuple[Param, ...], field: str) -> UnknownNameError:
    """Why `field` could not be read where it stands."""
    named = [param for param in params if param.label and field.startswith(param.label)]
    spelled = [param.spell(value) for param in named[:1] for value in param.values]
    if spelled and field not in spelled:
        return UnknownNameError(
            f"config field {field!r} does not name a {named[0].name}", f"use one of {', '.join(spelled)}"
        )
    labels = ", ".join(param.label for param in params)
    return UnknownNameError(
        f"config field {field!r} is out of place or one too many", f"each may stand once, in this order: {labels}"
    )
