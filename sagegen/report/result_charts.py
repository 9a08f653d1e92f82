"""Charts of results: standings, predicted against measured, roofline, rate by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sagegen.report.cases import Case, ProblemFacts
from sagegen.report.drawing import WIDTH, Chart, Key, Shape
from sagegen.report.figure import Figure, format_number, format_tokens
from sagegen.report.importance import Agreement
from sagegen.report.limits import Roof, find_roofs, least_bytes
from sagegen.report.scale import Scale, linear_scale, log_scale
from sagegen.report.search_charts import tick_names
from sagegen.report.standings import Row
from sagegen.space import parse_config

_LEFT, _RIGHT = 46, 330
_TOP, _BOTTOM = 28, 196
#: Room that a line of text needs between two lines.
_CROWDED = 16
#: By whether it is predicted: how a winner is marked in a roofline.
_WINNERS: Mapping[bool, tuple[Shape, str, str]] = {
    False: ("diamond", "win", "winner of a length"),
    True: ("ring", "guess", "~ winner of a length, predicted"),
}


def draw_standings(rows: Sequence[Row]) -> Chart | None:
    """Bars of full calls, of which a darker part is the attention kernel."""
    drawn = [(row, row.call) for row in rows if row.call is not None]
    if not drawn:
        return None
    chart = Chart(
        "Winner beside the others",
        "Time of the full call: " + ", ".join(f"{row.who} {call.text('µs')}" for row, call in drawn) + ".",
        len(drawn) * 34 + 50,
    )
    left, bottom = 10, len(drawn) * 34 + 14
    x = linear_scale([call.value for _, call in drawn], left, WIDTH - 12, 4)
    chart.x_axis(x, 10, bottom, "full call, µs", tick_names(x))
    for place, (row, call) in enumerate(drawn):
        y = 12 + place * 34
        chart.text(left + 2, y + 11, row.who, "row")
        chart.text(WIDTH - 12, y + 11, call.text("µs"), "value", "end")
        width = x.place(call.value) - left
        chart.box(left, y + 16, width, 11, "guess-bar" if call.is_predicted else row.kind)
        if row.kernel is not None and not call.is_predicted:
            chart.box(left, y + 16, min(x.place(row.kernel.value) - left, width), 11, f"{row.kind} inner")
    kinds = {call.origin for _, call in drawn}
    if any(row.kernel is not None and not call.is_predicted for row, call in drawn):
        chart.keys += [Key("bar", "win inner", "attention kernel"), Key("bar", "win", "its quantizers")]
    if "predicted" in kinds:
        chart.keys.append(Key("bar", "guess-bar", "~ predicted, not measured"))
    return chart


def draw_agreement(case: Case, agreement: Agreement | None) -> Chart | None:
    """The model's time over the measured one, with the line where they are equal; None without both."""
    both = [a for a in case.timed if case.tokens in a.predicted]
    if not both or agreement is None:
        return None
    times = [a.call[case.tokens].value for a in both]
    guesses = [a.predicted[case.tokens].value for a in both]
    rho = "too few for a rank correlation" if agreement.spearman is None else f"Spearman {agreement.spearman:.2f}"
    chart = Chart(
        "Predicted against measured",
        f"The model's time of the full call over the measured one, {len(both)} attempts: {rho}. Of its {agreement.top} "
        f"favourites the fastest is {agreement.behind - 1:.1%} behind the best. "
        f"Predicted over measured is {agreement.median_ratio:.2f} in the middle.",
        240,
        f"{rho}; best of its first {agreement.top}: {agreement.behind - 1:.1%} behind the fastest; predicted / "
        f"measured: {agreement.median_ratio:.2f} in the middle.",
    )
    span = [*times, *guesses]
    x, y = log_scale(span, _LEFT, _RIGHT), log_scale(span, _BOTTOM, _TOP)
    chart.y_axis(y, _LEFT, _RIGHT, "~ predicted by the model, µs (log)", tick_names(y))
    chart.x_axis(x, _TOP, _BOTTOM, "measured, µs (log)", tick_names(x))
    chart.line([(x.place(v), y.place(v)) for v in (x.low, x.high)], "equal")
    chart.points([(x.place(t), y.place(g)) for t, g in zip(times, guesses, strict=True)], "ring", "guess")
    chart.keys = [Key("ring", "guess", "~ an attempt, as predicted"), Key("line", "equal", "equal")]
    return chart


def draw_roofline(facts: ProblemFacts) -> Chart | None:
    """Rates of the winners' attention kernels over operations per byte, below the limits of the GPU."""
    spots = [spot for case in facts.cases if (spot := _roofline_spot(case)) is not None]
    if not spots:
        return None
    roofs = find_roofs(facts.gpu, facts.problem, parse_config(spots[-1][0].winner or ""))
    flat = [roof for roof in roofs if not roof.is_slope]
    chart = Chart("Roofline", _describe_roofline(spots, roofs), 252, _basis_note(roofs))
    x = log_scale([*(i for _, i, _ in spots), min(i for _, i, _ in spots) / 12], _LEFT, _RIGHT)
    rates = [*(rate.value for _, _, rate in spots), *(roof.tops for roof in flat)]
    y = log_scale([*rates, min(rates) / 3], 206, 40, margin=0.08)
    chart.y_axis(y, _LEFT, _RIGHT, "attention kernel, TOPS (log)", tick_names(y))
    chart.x_axis(x, 40, 206, "operations per byte, at least (log)", tick_names(x))
    for roof in roofs:
        _draw_roof(chart, roof, x, y, is_crowded=any(0 < y.place(roof.tops) - y.place(o.tops) < _CROWDED for o in flat))
    for is_predicted, (shape, kind, text) in _WINNERS.items():
        own = [(case, i, rate) for case, i, rate in spots if rate.is_predicted == is_predicted]
        for case, intensity, rate in own:
            place = (x.place(intensity), y.place(rate.value))
            chart.points([place], shape, kind, f"{format_tokens(case.tokens)}: {rate.text('TOPS')}")
        if own:
            chart.keys.append(Key(shape, kind, text))
    for case, intensity, rate in (spots[0], *spots[1:][-1:]):
        chart.text(x.place(intensity), y.place(rate.value) + 17, format_tokens(case.tokens), "tick", "middle")
    chart.keys += [Key("line", f"roof {basis}", f"limit by {'a probe' if basis == 'probe' else 'the table of GPUs'}")
                   for basis in sorted({roof.basis for roof in roofs})]  # fmt: skip
    return chart


def _roofline_spot(case: Case) -> tuple[Case, float, Figure] | None:
    kernel, winner = case.best_kernel, case.winner
    if kernel is None or winner is None:
        return None
    return (
        case,
        case.operations / least_bytes(parse_config(winner), case.problem, case.shape),
        kernel.rate(case.operations),
    )


def _draw_roof(chart: Chart, roof: Roof, x: Scale, y: Scale, is_crowded: bool) -> None:
    """A limit's line with its name above, or below where another line is close above."""
    kind, name = f"roof {roof.basis}", f"{roof.name}, {roof.basis}"
    if not roof.is_slope:
        at = y.place(roof.tops)
        chart.line([(x.start, at), (x.end, at)], kind)
        chart.text(x.end, at + 12 if is_crowded else at - 4, f"{name}: {format_number(roof.tops)}", "floor-name", "end")
        return
    ends = (max(x.low, y.low / roof.tops), min(x.high, y.high / roof.tops))
    if ends[0] < ends[1]:
        chart.line([(x.place(i), y.place(i * roof.tops)) for i in ends], kind)
        chart.text(x.place(ends[0]) + 12, y.place(ends[0] * roof.tops) - 6, name, "floor-name")


def _describe_roofline(spots: Sequence[tuple[Case, float, Figure]], roofs: Sequence[Roof]) -> str:
    rates = ", ".join(f"{format_tokens(case.tokens)} {rate.text('TOPS')}" for case, _, rate in spots)
    limits = ", ".join(
        f"{roof.name} {format_number(roof.tops)} {'TB/s' if roof.is_slope else 'TOPS'} (by the {roof.basis})"
        for roof in roofs
    )
    return f"Attention kernels of the winners: {rates}. Limits: {limits}."


def _basis_note(roofs: Sequence[Roof]) -> str:
    tabled = [roof.name for roof in roofs if roof.basis == "table"]
    probed = [roof.name for roof in roofs if roof.basis == "probe"]
    words = []
    if probed:
        words.append(f"Measured by sagegen probe: {', '.join(probed)}.")
    if tabled:
        words.append(f"From the table of GPUs, not measured here: {', '.join(tabled)}.")
    if not any(roof.name == "matrix units" for roof in roofs):
        words.append("The rate of this kernel's matrix units is not in the table of GPUs; a probe would tell.")
    return " ".join(words)


def draw_lengths(facts: ProblemFacts) -> Chart | None:
    """Rates of the winners' full calls by length, beside the default's and SDPA's; None where no time is known."""
    winners = {case.tokens: call.rate(case.operations) for case in facts.cases if (call := case.best_call) is not None}
    if not winners:
        return None
    series: dict[tuple[str, Shape, str], dict[int, Figure]] = {
        ("winner", "diamond", "win"): winners,
        ("default config", "square", "default"): {
            case.tokens: winners[case.tokens].scaled(1 / case.speed_vs_default)
            for case in facts.cases
            if case.speed_vs_default and case.tokens in winners
        },
        ("torch SDPA", "triangle", "peer"): {
            case.tokens: case.sdpa.rate(case.operations) for case in facts.cases if case.sdpa
        },
    }
    has_guess = any(figure.is_predicted for figure in winners.values())
    rates = "; ".join(f"{format_tokens(tokens)} {figure.text()}" for tokens, figure in winners.items())
    chart = Chart(
        "Rate by length",
        f"TOPS of the winners' full calls: {rates}{' (~: predicted by the model, not measured)' if has_guess else ''}.",
        236,
    )
    y = linear_scale([figure.value for own in series.values() for figure in own.values()], _BOTTOM, _TOP)
    span = log_scale(list(winners) if len(winners) > 1 else [min(winners) / 2, min(winners) * 2], _LEFT, _RIGHT)
    x = Scale(span.low, span.high, span.start, span.end, True, tuple(winners))
    chart.y_axis(y, _LEFT, _RIGHT, "full call, TOPS", tick_names(y))
    chart.x_axis(x, _TOP, _BOTTOM, "keys = queries", [format_tokens(int(tick)) for tick in x.ticks])
    for (name, shape, kind), own in series.items():
        _draw_rates(chart, name, shape, kind, own, x, y)
    return chart


def _draw_rates(chart: Chart, name: str, shape: Shape, kind: str, rates: dict[int, Figure], x: Scale, y: Scale) -> None:
    """One line of `draw_lengths`; its predictions in their own style, with a legend that says so."""
    for is_predicted in (False, True):
        places = [(x.place(n), y.place(rate.value)) for n, rate in rates.items() if rate.is_predicted == is_predicted]
        if places and is_predicted:
            chart.line(places, "guess-line")
            chart.points(places, "ring", "guess")
            chart.keys.append(Key("ring", "guess", f"~ {name}, predicted by the model"))
        elif places:
            chart.line(places, f"{kind}-line")
            chart.points(places, shape, kind)
            chart.keys.append(Key(shape, kind, name))
