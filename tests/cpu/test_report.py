"""`sagegen report`: what the page says, of recorded journals, shipped registries and hostile files."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from sagegen.cli.main import main
from sagegen.errors import RegistryError
from sagegen.report import collection
from sagegen.report.contents import describe_errors, make_page
from sagegen.report.page import render_page
from sagegen.report.sources import read_inputs
from sagegen.report.text import show_text

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "docs" / "gpu-runs"
JOURNAL = RUNS / "2026-11-30c-h200-bf16-journal.jsonl.gz"
PROBE = RUNS / "2026-11-30d-h200-probe.yaml"
VOID = {"meta", "link", "path", "br", "img", "input", "hr"}
MARKED = ("guess", "guess-text", "guess-bar", "guess-line", "tag", "banner")


class Element:
    """A tag of a page: its attributes, the elements around it, the text directly inside."""

    def __init__(self, tag: str, attributes: dict[str, str | None], parent: Element | None) -> None:
        self.tag, self.attributes, self.parent, self.text = tag, attributes, parent, ""

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    @property
    def ancestors(self) -> list[Element]:
        return [self, *(self.parent.ancestors if self.parent else [])]


class Parser(HTMLParser):
    """All elements of a page, in order; an element that is not closed in its place is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.open: list[Element] = []
        self.feed(text)
        assert [element.tag for element in self.open] == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute occurs twice in {attrs}"
        self.elements.append(Element(tag, dict(attrs), self.open[-1] if self.open else None))
        if tag not in VOID or tag == "path":
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs), self.open[-1] if self.open else None))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1].text += data


def make_html(*paths: Path, probe: Path | None = None) -> str:
    return render_page(make_page(read_inputs(paths), probe, "sagegen report"))


@pytest.fixture(scope="module")
def recorded() -> str:
    """The page of the run on an H200, which was measured; without a registry."""
    return make_html(JOURNAL, probe=PROBE)


@pytest.fixture(scope="module")
def predicted() -> str:
    """The page of a GPU that nothing was measured on."""
    return make_html(ROOT / "tuned" / "l20.yaml")


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One problem of that run, for pages that are made several times."""
    records = [record for record in records_of(JOURNAL) if record["problem"] == "d128_bf16_full_int8"]
    return write_journal(tmp_path_factory.mktemp("journal") / "part.jsonl", records)


@pytest.fixture(params=["recorded", "predicted"])
def page(request: pytest.FixtureRequest) -> str:
    text = request.getfixturevalue(request.param)
    assert isinstance(text, str)
    return text


def records_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write_journal(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# ---- what it says


def test_the_winners_are_those_that_the_run_wrote_down(recorded: str) -> None:
    """docs/gpu-runs/2026-11-30c-h200.md names what the finals decided at 16K."""
    written = (RUNS / "2026-11-30c-h200.md").read_text()
    for key, winner in (
        ("h200-d128_bf16_full_int8-16384", "wgmma_c2_bk256_st2_scplain_acone_ks256_rsskip_suones_expacked_laearly"),
        ("h200-d64_bf16_full_int8-16384",
         "wgmma_c2_bk256_st2_scoverlap_acone_ks256_rsskip_suones_expacked_laearly_qqprologue"),
    ):  # fmt: skip
        assert winner in written
        body = recorded.partition(f'id="{key}"')[2]
        assert re.match(rf'><p class="winner">Winner: <code>{winner}</code>', re.sub(r">\s+<", "><", body))


def test_attempts_and_failures_are_those_of_the_journal(recorded: str) -> None:
    """Counted by hand with zcat, grep and wc: 356 screens that ended ok, 28 builds that broke a constraint."""
    assert "384, of which 28 failed" in recorded
    text = re.sub(r"<[^>]+>", " ", recorded)
    outcomes = re.findall(r"Attempts by outcome: ok (\d+), constraint (\d+)\.", text)
    assert [sum(int(pair[i]) for pair in outcomes) for i in (0, 1)] == [356, 28]


def test_every_chart_that_the_issue_lists_is_there_for_every_length(recorded: str) -> None:
    parts = recorded.split('<details class="case"')[1:]
    assert len(parts) == 4 * 5
    for part in parts:
        for title in ("Winner beside the others", "Best so far", "Time and accuracy", "Predicted against measured",
                      "Time against each parameter, and its importance"):  # fmt: skip
            assert part.count(f"<h4>{title}</h4>") == 1, title
    assert recorded.count("<h3>Roofline</h3>") == recorded.count("<h4>How attempts ended</h4>") == 4


def test_limits_say_whether_a_probe_measured_them(recorded: str, part: Path) -> None:
    """By hand: the harmonic mean of the probe's 1861.74 (s8) and 1701.81 (e4m3) TOPS; 3.961 TB/s."""
    assert f"{2 / (1 / 1861.74 + 1 / 1701.81):,.0f} TOPS (by the probe)" in recorded
    assert "device memory 3.961 TB/s (by the probe)" in recorded
    assert "by the table" not in recorded
    bare = make_html(part)
    assert "device memory 4.800 TB/s (by the table)" in bare
    assert "From the table of GPUs, not measured here: device memory." in bare
    assert "no probe was named" in bare


def test_a_registry_beside_a_journal_adds_sdpa(recorded: str, part: Path) -> None:
    """By an entry's own figures: torch's call took its full_us times its speed over SDPA."""
    registry = ROOT / "tuned" / "h200.yaml"
    text = make_html(part, registry)
    assert "torch SDPA, fastest backend" in text
    assert "torch SDPA, fastest backend" not in recorded
    own = registry.read_text().partition("problem: d128_bf16_full_int8")[2]
    entry = re.search(r"full_us: ([\d.]+)\n.*\n.*\n +speed_vs_sdpa: ([\d.]+)", own)
    assert entry is not None
    assert f">{float(entry[1]) * float(entry[2]):,.1f}<" in text


def test_the_same_files_give_the_same_bytes(part: Path) -> None:
    assert make_html(part, probe=PROBE) == make_html(part, probe=PROBE)


def test_pages_of_several_gpus_name_them_everywhere() -> None:
    page = make_html(ROOT / "tuned" / "l20.yaml", ROOT / "tuned" / "a100.yaml")
    for gpu in ("l20", "a100"):
        assert f'<th scope="row">{gpu} d128_bf16_full_int8</th>' in page
        assert f">{gpu} d128_bf16_full_int8</a>" in page


# ---- predicted and measured


def test_a_page_of_an_absent_gpu_says_predicted_at_the_top(predicted: str) -> None:
    body = predicted.partition("<h1>")[2]
    assert body.index("Predicted, not measured.") < body.index("<nav")
    assert ", predicted</h1>" in body
    assert ">Measured<" not in predicted
    elements = Parser(predicted).elements
    shown = {name for element in elements for name in element.classes}
    assert shown.isdisjoint({"diamond", "win", "win-line", "rate", "inner", "default-line", "peer-line", "best"})
    assert {"guess", "guess-bar", "guess-line", "guess-text"} <= shown


def test_every_time_of_an_absent_gpu_has_its_mark(predicted: str) -> None:
    registry = (ROOT / "tuned" / "l20.yaml").read_text()
    times = {float(us) for us in re.findall(r"predicted_(?:full_)?us: ([\d.]+)", registry)}
    text = re.sub(r"<svg.*?</svg>", " ", predicted, flags=re.S)
    for us in times:
        shown = f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"
        found = [match.start() for match in re.finditer(rf"(?<![\d,.]){re.escape(shown)}(?![\d,.])", text)]
        assert all(text[place - 1] == "~" for place in found)


def shift_predictions(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    predict = collection.predict

    def shifted(*arguments):
        prediction = predict(*arguments)
        return type("Shifted", (), {"call_us": prediction.call_us * factor})

    monkeypatch.setattr(collection, "predict", shifted)


def without_predictions(text: str) -> list[tuple]:
    """What a page shows as measured: marks, table cells and text, less what is marked as predicted.

    The chart of predictions over measurements is left out: its axes span both.
    """
    kept = []
    for chart in re.findall(r'<svg class="chart".*?</svg>', text, re.S):
        if "Predicted against measured</title>" in chart:
            text = text.replace(chart, "")
    for element in Parser(text).elements:
        marked = any(name in MARKED for own in element.ancestors for name in own.classes)
        if not marked and "~" not in element.text and element.tag not in ("p", "desc"):
            kept.append((element.tag, element.attributes.get("d"), element.attributes.get("class"), element.text))
    return kept


def test_nothing_that_looks_measured_depends_on_the_model(part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions that are a fifth smaller change the page, but only where it says that they are predictions."""
    page = make_html(part, probe=PROBE)
    shift_predictions(monkeypatch, 0.8)
    shifted = make_html(part, probe=PROBE)
    assert shifted != page
    assert without_predictions(shifted) == without_predictions(page)


def test_marks_over_the_models_axis_are_predictions(recorded: str) -> None:
    charts = [chart for chart in re.findall(r'<svg class="chart".*?</svg>', recorded, re.S)
              if "Predicted against measured</title>" in chart]  # fmt: skip
    assert len(charts) == 20
    for chart in charts:
        kinds = {element.attributes["class"] for element in Parser(chart).elements if element.tag == "path"}
        assert kinds == {"grid", "equal", "ring guess"}
        assert ">~ predicted by the model, µs (log)</text>" in chart


def test_times_of_a_predicted_entry_that_claim_to_be_measured_are_not_shown(tmp_path: Path) -> None:
    """Whether the registry's reader refuses such a file or leaves it to the page."""
    text = (ROOT / "tuned" / "l20.yaml").read_text()
    forged = re.sub(r"predicted_us: .*", "kernel_us: 777.7\n    full_us: 888.8\n    speed_vs_sdpa: 9.5", text)
    path = tmp_path / "l20.yaml"
    path.write_text(re.sub(r" +predicted_full_us: .*\n", "", forged))
    try:
        page = make_html(path)
    except RegistryError:
        return
    assert "777.7" not in page
    assert "888.8" not in page
    assert "torch SDPA, fastest backend" not in page
    assert "Predicted, not measured." in page


def test_the_models_error_is_said_where_a_registry_has_it() -> None:
    measured, old = {"kind": "measured"}, {"kind": "predicted"}
    new = {"kind": "predicted", "model_error": 0.09, "model_checked_on": "h200"}
    assert describe_errors([measured, old]) == ()
    (said,) = describe_errors([measured, old, new, new])
    assert "within 9% of what h200 measured" in said


# ---- hostile input

HOSTILE = "</code><script>alert('x')</script>\"'><img src=x onerror=alert(1)>\x1b[31m\x00\u202e"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A journal whose every string may have been written by someone else."""
    first, *rest = records_of(JOURNAL)[:40]
    for number, record in enumerate(rest):
        record.update(product=HOSTILE, driver=HOSTILE, nvcc=HOSTILE)
        if number % 3 == 0:
            record.update(phase="build", outcome="crash", reason=HOSTILE * (number + 1), samples=[])
    bad = [
        first | {"config": HOSTILE},
        first | {"problem": HOSTILE},
        first | {"gpu": HOSTILE},
        first | {"config": first["config"].upper()},
        first | {"samples": [sample | {"times_us": []} for sample in first["samples"]]},
        first | {"samples": [sample | {"times_us": [-1.0], "call_us": [1.0]} for sample in first["samples"]]},
        first | {"samples": [sample | {"tokens": 10**15} for sample in first["samples"]]},
        first | {"samples": [sample | {"heads_kv": 0} for sample in first["samples"]]},
        first | {"samples": [sample | {"times_us": [1e300], "call_us": [1e-300]} for sample in first["samples"]]},
        first | {"samples": []},
        first | {"figures": {"normal": {"cosine": 1e300}}},
        first | {"figures": {"normal": {"relative_l1": 0.1}}},
        first | {"resources": {"attention": {"registers": -5}}},
        first | {"resources": {HOSTILE: {HOSTILE: 1}}, "figures": {**first["figures"], HOSTILE: {"cosine": 0.5}}},
    ]
    return write_journal(tmp_path / "a <script>alert(2)<script> \"'.jsonl", [first, *bad, *rest])


def test_strings_of_a_journal_are_text_whatever_they_hold(hostile: Path) -> None:
    page = make_html(hostile)
    elements = Parser(page).elements
    assert "script" not in {element.tag for element in elements}
    assert "img" not in {element.tag for element in elements}
    names = {name for element in elements for name in element.attributes}
    assert not [name for name in names if name.startswith("on") or name == "style"]
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\\x1b[31m\\x00\\u202e" in page
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page) is None


def test_records_that_no_run_wrote_are_left_out_and_counted(hostile: Path) -> None:
    page = make_html(hostile)
    left_out = page.partition("Records left out")[2].partition("</ul>")[0]
    counts = [int(count) for count in re.findall(r"<li>(\d+):", left_out)]
    # twelve of the fourteen above: strange resources and kinds of inputs cost nobody the times
    assert sum(counts) == 12
    assert "names no kernel family" in left_out


def test_text_is_shown_in_characters_that_print() -> None:
    assert show_text("a\tb\x9b\ud800\u2028é µ") == "a\\tb\\x9b\\ud800\\u2028é µ"
    assert (show_text(None), show_text(3)) == ("–", 3)


def test_a_registry_whose_shapes_are_prose_is_shown_without_charts(tmp_path: Path) -> None:
    text = (ROOT / "tuned" / "l20.yaml").read_text()
    path = tmp_path / "l20.yaml"
    path.write_text(re.sub(r"shape: .*", "shape: '<script>alert(1)</script>'", text))
    page = make_html(path)
    assert "<script" not in page
    assert page.count('aria-label="Registry entries"') == 8


def test_a_race_adds_its_peers_and_its_strings_are_text(part: Path, tmp_path: Path) -> None:
    shape = {"batch": 4, "heads_q": 32, "heads_kv": 32, "q_len": 16384, "kv_len": 16384}
    race = {
        "work": HOSTILE, "problem": "d128_bf16_full_int8", "shape": shape, "contenders": [{"config": HOSTILE}],
        "rivals": {"cudnn-fp8": {"sustained": {"median_us": 9.0, "tops": 921.4}}, HOSTILE: {}},
        "scores": [{"part": "kernel", "tier": "fine", "rival": "kernel 0", "tops": 1136.2}],
        "absent": {HOSTILE: HOSTILE},
    }  # fmt: skip
    path = tmp_path / "race.json"
    path.write_text(json.dumps({"machine": {"GPU": "NVIDIA H200"}, "races": [race]}))
    page = make_html(part, path)
    assert "cuDNN FP8 921.4 TOPS" in page
    assert "sagegen kernel, fine 1,136 TOPS" in page
    assert "<script" not in page
    assert "<img" not in page
    Parser(page)


# ---- the page as a document


def test_it_is_well_formed_and_asks_for_nothing(page: str) -> None:
    elements = Parser(page).elements
    ids = [element.attributes["id"] for element in elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    for element in elements:
        for name in ("href", "src", "data", "action", "xlink:href"):
            link = element.attributes.get(name)
            assert link is None or link == "data:," or link.removeprefix("#") in ids, link
        for name in (element.attributes.get("aria-labelledby") or "").split():
            assert name in ids
    assert {element.tag for element in elements}.isdisjoint({"script", "iframe", "object", "embed", "form", "base"})
    assert "@import" not in page
    assert set(re.findall(r"url\((.*?)\)", page)) <= {"#hatch"}


def test_the_policy_allows_its_own_style_sheet_and_nothing_else(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert policy is not None
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy[1].replace("&#39;", "'").split("; ") == [
        "default-src 'none'", f"style-src 'sha256-{digest}'", "img-src data:", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip
    assert page.index("Content-Security-Policy") < page.index("<style>")
    assert " style=" not in page


def test_headings_landmarks_and_charts_can_be_read_aloud(page: str) -> None:
    elements = Parser(page).elements
    levels = [int(element.tag[1]) for element in elements if re.fullmatch("h[1-6]", element.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert {"header", "nav", "main", "footer"} <= {element.tag for element in elements}
    charts = [element for element in elements if "chart" in element.classes]
    assert len(charts) > 20
    for chart in charts:
        inside = [element for element in elements if element.parent is chart]
        assert [element.tag for element in inside[:2]] == ["title", "desc"]
        assert all(len(element.text) > 5 for element in inside[:2])
        assert chart.attributes["role"] == "img"
    for element in elements:
        if "scroll" in element.classes:
            assert (element.attributes["role"], element.attributes["tabindex"]) == ("region", "0")
            assert element.attributes["aria-label"]


def test_numbers_of_the_charts_are_in_tables(recorded: str) -> None:
    for body in recorded.split('<details class="case"')[1:]:
        assert body.partition("<h3>By length</h3>")[0].count('<details class="numbers">') >= 3
    assert recorded.count('<details class="all">') == 4  # has the points of the two other charts


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.2."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart(page: str, scheme: int) -> None:
    """WCAG 2.2: 4.5 for text, 3 for what a chart is made of."""
    blocks = re.findall(r":root\{(.*?)\}", page, re.S)
    colours = dict(re.findall(r"--([\w-]+):(#[0-9a-f]{6})", blocks[scheme]))
    for ground in ("bg", "card"):
        for text in ("text", "soft", "link", "guess", "bad", "good", "floor", "focus"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["guess"], colours["guess-bg"]) >= 4.5
    assert contrast(colours["text"], colours["guess-bg"]) >= 4.5
    for mark in ("win", "inner", "default", "also", "also-inner", "peer", "other", "coarse", "best", "bad", "good",
                 "guess", "floor", "edge"):  # fmt: skip
        assert contrast(colours[mark], colours["card"]) >= 3, mark


#: Viénot, Brettel and Mollon 1999, on linear RGB: what people see who lack one kind of cones.
SIGHTS = {
    "protan": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deutan": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


def seen(colour: str, sight: str) -> list[float]:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    mixed = [sum(a * b for a, b in zip(row, linear, strict=True)) for row in SIGHTS[sight]]
    return [255 * (12.92 * v if v <= 0.0031308 else 1.055 * max(v, 0) ** (1 / 2.4) - 0.055) for v in mixed]


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_series_of_a_chart_differ_for_the_colour_blind(page: str, scheme: int, sight: str) -> None:
    colours = dict(re.findall(r"--([\w-]+):(#[0-9a-f]{6})", re.findall(r":root\{(.*?)\}", page, re.S)[scheme]))
    names = ("win", "default", "peer", "guess", "other")
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            pair = zip(seen(colours[first], sight), seen(colours[second], sight), strict=True)
            assert sum((a - b) ** 2 for a, b in pair) ** 0.5 > 40, (first, second)


# ---- the command


def report(*arguments: str | Path):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_command_writes_the_page_and_says_what_it_is(tmp_path: Path) -> None:
    out = tmp_path / "l20.html"
    result = report(ROOT / "tuned" / "l20.yaml", "-o", out, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.output)
    assert (facts["origin"], facts["gpus"], len(facts["problems"])) == ("predicted", ["l20"], 8)
    assert facts["bytes"] == len(out.read_bytes())
    assert "8 problems, predicted" in report(ROOT / "tuned" / "l20.yaml", "-o", out).output


def test_files_that_are_neither_and_empty_journals_are_misuse(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    result = report(tmp_path / "notes.txt")
    assert result.exit_code == 2
    assert "no journal, registry or race" in result.stderr
    result = report(write_journal(tmp_path / "empty.jsonl", []))
    assert result.exit_code == 2
    assert "nothing to report" in result.stderr
    result = report(RUNS / "2026-12-01b-h200-race.json", "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "name a journal or a registry beside the races" in result.stderr
    (tmp_path / "l20.yaml").write_text("schema: 1\ngpu: l20\n")
    assert "l20.yaml:3: the file is cut short" in report(tmp_path / "l20.yaml").stderr


def test_a_probe_of_another_gpu_is_misuse(tmp_path: Path) -> None:
    result = report(ROOT / "tuned" / "l20.yaml", "--probe", PROBE, "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "is a probe of h200, not of l20" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_page_is_not_written_over_what_it_is_made_from(tmp_path: Path) -> None:
    registry = tmp_path / "l20.yaml"
    registry.write_bytes((ROOT / "tuned" / "l20.yaml").read_bytes())
    result = report(registry, "-o", tmp_path / "." / "l20.yaml")
    assert result.exit_code == 2
    assert "would be written over what it is made from" in result.stderr
    assert registry.read_bytes() == (ROOT / "tuned" / "l20.yaml").read_bytes()


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    result = report(ROOT / "tuned" / "l20.yaml", "-o", tmp_path / "none" / "page.html")
    assert result.exit_code == 2
    assert str(tmp_path / "none") in result.stderr


# ---- the committed page


def test_the_committed_page_is_of_the_recorded_run_and_small() -> None:
    path = ROOT / "docs" / "report" / "h200.html"
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 1.5e6
    assert hashlib.sha256(JOURNAL.read_bytes()).hexdigest() in text
    command = re.search(r"Made by <code>(.*?)</code>", text)
    assert command is not None
    assert command[1] in (ROOT / "docs" / "report.md").read_text()
    style = ROOT / "sagegen" / "report" / "templates" / "style.css"
    assert style.read_text() in text, f"the page is of an older design; make it again: {command[1]}"
    pictures = list((ROOT / "docs" / "report").glob("*.png"))
    assert pictures
    assert sum(picture.stat().st_size for picture in pictures) <= 600 * 1024
