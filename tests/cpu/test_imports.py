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
    "space",
    "layout",
    "rules",
    "abi",
    "plan",
    # building it
    "render",
    "cubin",
    "store",
    "toolkit",
    "build",
    # running it, the truth it is held to, measuring it
    "launch",
    "call",
    "reference",
    "inputs",
    "gate",
    "bench",
    "telemetry",
    "jobs",
    "measure",
    "worker_main",
    "worker",
    # what is kept
    "entry",
    "registry_file",
    "registry",
    # answering a call
    "arguments",
    "explanation",
    "choose",
    "fallback",
    "fetch",
    "answers",
    "dispatch",
    "library",
    "op",
    # searching
    "journal",
    "events",
    "model",
    "search",
    "variants",
    "plant",
    "examine",
    "finals",
    "entries",
    "ledger",
    "request",
    "judge",
    "offline",
    "tune",
)
#: What a caller of `sagegen.attention` must not pay for.
HEAVY = ("optuna", "jinja2", "click", "rich", "matplotlib", "sqlalchemy", "cuda", "pynvml", "ninja", "filelock")

PACKAGE = Path(sagegen.__file__).parent
COMMANDS = Path(sagegen.cli.__file__).parent


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every sagegen module that a file imports anywhere, functions and TYPE_CHECKING included, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: import by absolute name"
            names = (
                [f"sagegen.{alias.name}" for alias in node.names] if node.module == "sagegen" else [node.module or ""]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("sagegen."):
                yield node.lineno, name.split(".")[1]


def module_names() -> set[str]:
    return {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}


def test_the_order_lists_every_module_once() -> None:
    assert sorted(ORDER) == sorted(module_names())


@pytest.mark.parametrize("name", sorted(module_names()))
def test_a_module_imports_only_modules_before_it(name: str) -> None:
    allowed = ORDER[: ORDER.index(name)] if name in ORDER else ()
    wrong = [
        f"{name}.py:{line} imports {other}"
        for line, other in own_imports(PACKAGE / f"{name}.py")
        if other not in allowed
    ]
    assert wrong == []


def test_commands_import_no_other_command() -> None:
    shared = {"cli"} | module_names()
    for path in COMMANDS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sagegen.cli"):
                assert node.module == "sagegen.cli.options", f"{path.name}:{node.lineno} imports {node.module}"
        assert {other for _, other in own_imports(path)} <= shared, path.name


def run_script(script: str) -> dict[str, object]:
    """What `script` prints as JSON, run in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_the_run_path_loads_nothing_heavy_and_makes_no_context() -> None:
    answer = run_script(
        "import json, sys, torch; before = set(sys.modules);"
        "import sagegen, sagegen.op, sagegen.dispatch, sagegen.registry, sagegen.store, sagegen.launch;"
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
