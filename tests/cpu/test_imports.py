"""Who may import whom, and what `import sagegen` costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sagegen.cli

#: The one order of modules: each imports only modules before it. A new module takes its place here.
ORDER = (
    # what is asked, where, and what may be built
    "errors",
    "env",
    "problem",
    "gpu",
    "param",
    "mma_space",
    "wgmma_space",
    "space",
    "layout",
    "rule",
    "smoothing_rules",
    "e4m3_rules",
    "mma_rules",
    "wgmma_rules",
    "rules",
    "abi",
    "counts",
    "plan",
    # building it
    "render",
    "interrupts",
    "cubin",
    "store",
    "toolkit",
    "compilers",
    "build",
    # running it, and the truth it is held to
    "launch",
    "quantizing",
    "smoothing",
    "operands",
    "mma_numerics",
    "wgmma_numerics",
    "reference",
    # running it on the CPU
    "emulator.compiler",
    "emulator.library",
    "emulator.places",
    "emulator.report",
    "emulator.program",
    # what is kept
    "entry",
    "registry_file",
    "registry_merge",
    "registry_cubins",
    "registry_disk",
    "registry_save",
    "registry_manifest",
    "registry_places",
    "registry",
    "registry_kernels",
    "registry_stale",
    # shipping it
    "shipping.bundle",
    "shipping.archive",
    "shipping.wheel",
    "shipping.sources",
    "shipping.merging",
    "shipping.difference",
    "shipping.sweep",
    # answering a call
    "runtime.device",
    "runtime.options",
    "runtime.arguments",
    "runtime.varlen_arguments",
    "runtime.merging",
    "runtime.explanation",
    "runtime.memo",
    "runtime.precision",
    "runtime.padding",
    "runtime.pinning",
    "runtime.relatives",
    "runtime.choose",
    "runtime.fallback",
    "runtime.varlen_fallback",
    "runtime.fetch",
    "runtime.splitting",
    "runtime.addresses",
    "runtime.answers",
    "runtime.sdpa_answer",
    "runtime.prepare",
    "runtime.ragged",
    "runtime.key_mask",
    "runtime.varlen_answers",
    "runtime.programs",
    "runtime.self_test",
    "runtime.machine",
    "runtime.dispatch",
    "runtime.varlen",
    "runtime.library",
    "runtime.torch_call",
    "runtime.op",
    "runtime.sdpa",
    "runtime.patching",
    # judging it
    "measuring.call",
    "measuring.inputs",
    "measuring.floors",
    "measuring.gate",
    "emulator.agreement",
    "measuring.emulated",
    "measuring.jobs",
    "measuring.bench",
    "measuring.verdict",
    "measuring.telemetry",
    "probing.probes",
    "probing.source",
    "probing.sass",
    "probing.accumulator",
    "probing.timing",
    "probing.result",
    "probing.report",
    "probing.run",
    "measuring.cudnn_fp8",
    "measuring.rivals",
    "measuring.measure",
    "measuring.worker_main",
    "measuring.worker",
    "probing.probe",
    "measuring.subjects",
    "measuring.comparison",
    "measuring.contenders",
    "measuring.goals",
    "measuring.race",
    "measuring.race_report",
    "measuring.variations",
    "measuring.around",
    "measuring.around_report",
    # comparing numerics
    "ablation.recipe",
    "ablation.grouping",
    "ablation.preparing",
    "ablation.weighting",
    "ablation.emulation",
    "ablation.deviation",
    "ablation.synthetic",
    "ablation.tables",
    "ablation.study",
    "ablation.report",
    # searching
    "tuning.packed",
    "tuning.journal",
    "tuning.distances",
    "tuning.events",
    "tuning.occupancy",
    "tuning.tile_counts",
    "tuning.disassembly",
    "tuning.tile_cost",
    "tuning.mma_cost",
    "tuning.wgmma_cost",
    "tuning.model",
    "tuning.strategy",
    "tuning.effort",
    "tuning.gains",
    "tuning.ranking",
    "tuning.validation",
    "tuning.validation_plot",
    "tuning.proposer",
    "tuning.search",
    "tuning.sharing",
    "tuning.variants",
    "tuning.pipeline",
    "tuning.plant",
    "tuning.examine",
    "tuning.replay",
    "tuning.finals",
    "tuning.entries",
    "tuning.gatekeeper",
    "tuning.ledger",
    "tuning.request",
    "tuning.incumbents",
    "tuning.starts",
    "tuning.judge",
    "tuning.repeat",
    "tuning.offline",
    "tuning.tune",
    # telling of it
    "report.figure",
    "report.text",
    "report.failures",
    "report.scale",
    "report.drawing",
    "report.races",
    "report.sources",
    "report.cases",
    "report.collection",
    "report.standings",
    "report.importance",
    "report.limits",
    "report.search_charts",
    "report.result_charts",
    "report.tables",
    "report.accuracy_charts",
    "report.contents",
    "report.page",
)
#: The two paths that a reader follows, without jumping back.
TUNE_PATH = (
    "problem",
    "space",
    "render",
    "build",
    "launch",
    "quantizing",
    "operands",
    "mma_numerics",
    "wgmma_numerics",
    "measuring.bench",
    "tuning.search",
    "tuning.tune",
)
RUN_PATH = ("registry", "runtime.dispatch", "runtime.op")
#: Helpers that commands share; commands import no other command.
SHARED_COMMAND_MODULES = {
    f"sagegen.cli.{name}"
    for name in (
        "around",
        "difference",
        "keeping",
        "options",
        "race",
        "repeat",
        "replay",
        "tuning_options",
        "values",
        "watch",
    )
}
#: What a caller of `sagegen.attention` must not pay for.
HEAVY = (
    "optuna",
    "jinja2",
    "click",
    "rich",
    "matplotlib",
    "sqlalchemy",
    "cuda",
    "pynvml",
    "ninja",
    "filelock",
    "zstandard",
)

PACKAGE = Path(sagegen.__file__).parent
PACKAGES = ("ablation", "emulator", "measuring", "probing", "report", "runtime", "shipping", "tuning")
COMMANDS = Path(sagegen.cli.__file__).parent


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every sagegen module that a file imports anywhere, functions and TYPE_CHECKING included, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: import by absolute name"
            module = (node.module or "").removeprefix("sagegen").removeprefix(".")
            if not (node.module or "").startswith("sagegen"):
                continue
            is_package = module == "" or module in PACKAGES
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names] if is_package else [module]
        elif isinstance(node, ast.Import):
            names = [a.name.removeprefix("sagegen.") for a in node.names if a.name.startswith("sagegen.")]
        else:
            continue
        for name in names:
            yield node.lineno, name


def module_paths() -> dict[str, Path]:
    found = {}
    for path in [*PACKAGE.glob("*.py"), *(p for name in PACKAGES for p in (PACKAGE / name).glob("*.py"))]:
        if path.stem != "__init__":
            found[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = path
    return found


def test_the_order_lists_every_module_once() -> None:
    assert sorted(ORDER) == sorted(module_paths())


@pytest.mark.parametrize("path", [TUNE_PATH, RUN_PATH], ids=["tune", "run"])
def test_a_reader_of_a_path_never_jumps_back(path: tuple[str, ...]) -> None:
    assert [ORDER.index(name) for name in path] == sorted(ORDER.index(name) for name in path)


@pytest.mark.parametrize("name", sorted(module_paths()))
def test_a_module_imports_only_modules_before_it(name: str) -> None:
    allowed = ORDER[: ORDER.index(name)] if name in ORDER else ()
    wrong = [
        f"{name}:{line} imports {other}" for line, other in own_imports(module_paths()[name]) if other not in allowed
    ]
    assert wrong == []


def test_commands_import_no_other_command() -> None:
    for path in set(COMMANDS.glob("*.py")) - {COMMANDS / "entry.py"}:  # which is no command, but starts them all
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sagegen.cli"):
                assert node.module in SHARED_COMMAND_MODULES, f"{path.name}:{node.lineno} imports {node.module}"


def run_script(script: str) -> dict[str, object]:
    """What `script` prints as JSON, run in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_the_run_path_loads_nothing_heavy_and_makes_no_context() -> None:
    answer = run_script(
        "import json, sys, torch; before = set(sys.modules);"
        "import sagegen, sagegen.runtime.op, sagegen.runtime.dispatch, sagegen.registry, sagegen.store, sagegen.launch;"
        "print(json.dumps({'loaded': sorted({m.split('.')[0] for m in set(sys.modules) - before}),"
        "'context': torch.cuda.is_initialized()}))"
    )
    loaded = answer["loaded"]
    assert isinstance(loaded, list)
    assert "sagegen" in loaded
    assert set(loaded).isdisjoint(HEAVY)
    assert answer["context"] is False


def test_importing_the_package_adds_little_to_torch() -> None:
    script = (
        "import json, sys, time, torch; before = set(sys.modules); start = time.perf_counter();"
        "import sagegen; sagegen.__name__;"
        "print(json.dumps({'seconds': time.perf_counter() - start, 'modules': len(set(sys.modules) - before)}))"
    )
    answers = [run_script(script) for _ in range(3)]
    # 50 ms is the promise; the count of modules is what it rests on, and does not depend on the machine's load
    assert min(float(str(answer["seconds"])) for answer in answers) < 0.05
    assert answers[0]["modules"] == 1
