"""Who may import whom, and what starting up may cost.

The layers are those of docs/architecture.md. A module may import its own layer and layers above it in the
table (lower numbers here), never below; `testing` may import all, and nothing but tests imports `testing`.
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).resolve().parents[1] / "src"
PACKAGE = "merge_stream"

LAYERS = (
    ("collector", "errors", "units", "options", "tensors"),
    ("storage",),
    ("containers",),
    ("formats", "architectures", "encodings", "discovery", "opening", "base_weights"),
    ("planning",),
    ("engine",),
    ("output", "verification", "report"),
    (
        "api",
        "benchmark",
        "job",
        "cli",
        "cli_bench",
        "cli_words",
        "cli_frame",
        "cli_options",
        "console",
        "forecast",
        "forecast_store",
        "inspection",
        "memory_files",
        "prediction",
        "vocabulary",
        "preflight",
        "steps",
        "store_job",
        "through_store",
        "verl_spelling",
        "__main__",
        "__init__",
    ),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FACE = len(LAYERS) - 1
LEVEL["testing"] = FACE + 1

NEVER = ("torch.distributed", "tests", "bench")
"""A merge needs no process group, and the product does not need its tests."""
MAKES_CHECKPOINTS = ("merge_stream.benchmark.synthetic",)
"""Makes what trainers leave, with what trainers use."""


def _package_modules(source: pathlib.Path) -> dict[str, pathlib.Path]:
    """Dotted name -> file, for every module of the package."""
    modules = {}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _imported_names(tree: ast.Module, module: str, *, is_package: bool) -> list[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in the file, functions and TYPE_CHECKING blocks included."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def _unit(dotted: str) -> str:
    """The name in the layer table that a module or a name inside it belongs to."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"


def _violations(source: pathlib.Path) -> list[str]:
    """One line for each import that the layer table forbids."""
    found = []
    for module, path in _package_modules(source).items():
        unit = module.split(".")[1] if "." in module else "__init__"
        where = path.relative_to(source)
        if unit not in LEVEL:
            found.append(f"{where}: '{unit}' is in no layer; give it a place in tests/test_imports.py")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for line, name in _imported_names(tree, module, is_package=path.name == "__init__.py"):
            if module not in MAKES_CHECKPOINTS and any(f"{name}.".startswith(f"{banned}.") for banned in NEVER):
                found.append(f"{where}:{line} imports {name}, which the product never does")
            elif name.split(".")[0] == PACKAGE and LEVEL[_unit(name)] > LEVEL[unit]:
                found.append(f"{where}:{line} imports {name}: '{unit}' may not know of '{_unit(name)}' below it")
    return found


def test_imports_point_upward_in_the_layer_table() -> None:
    violations = _violations(SOURCE)
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(
    ("module", "statement", "complaint"),
    [
        ("storage/local.py", "from merge_stream.engine.budget import Lease", "'storage' may not know of 'engine'"),
        ("engine/executor.py", "import merge_stream.api", "'engine' may not know of 'api'"),
        ("planning/plan.py", "from ..output import hugging_face", "'planning' may not know of 'output'"),
        ("planning/plan.py", "from merge_stream import merge", "'planning' may not know of '__init__'"),
        ("api.py", "def f():\n    import merge_stream.testing", "'api' may not know of 'testing'"),
        ("formats/dcp.py", "import torch.distributed.checkpoint", "the product never does"),
        ("helpers.py", "", "'helpers' is in no layer"),
        ("engine/executor.py", "from merge_stream.planning.plan import Plan", None),
        ("testing/crash.py", "import merge_stream.cli", None),
        ("planning/__init__.py", "from .plan import Plan", None),
    ],
)
def test_violations_are_found_and_named(
    tmp_path: pathlib.Path, module: str, statement: str, complaint: str | None
) -> None:
    path = tmp_path / PACKAGE / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(statement + "\n")
    violations = _violations(tmp_path)
    if complaint is None:
        assert not violations
    else:
        assert len(violations) == 1
        assert complaint in violations[0]
        assert module in violations[0]


def _loaded_by(statement: str) -> set[str]:
    """Top-level modules in memory after a statement, in a fresh interpreter."""
    script = f"{statement}\nimport sys\nprint('LOADED', *sorted({{name.split('.')[0] for name in sys.modules}}))"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=SOURCE
    )
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.rpartition("LOADED")[2].split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = _loaded_by("import merge_stream")
    assert PACKAGE in loaded
    assert not loaded & {"torch", "zarr", "rich", "numpy", "safetensors", "click", "ml_dtypes"}


def test_help_starts_without_torch_and_zarr() -> None:
    statement = (
        "import sys, contextlib\nfrom merge_stream.__main__ import main\nsys.argv = ['merge-stream', '--help']\n"
        "with contextlib.suppress(SystemExit):\n    main()"
    )
    assert not _loaded_by(statement) & {"torch", "zarr", "rich"}
