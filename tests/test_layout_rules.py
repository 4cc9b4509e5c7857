"""Who may import whom, and how long files and functions may be (docs: design, section 3)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(p for folder in ("jaxpp", "models", "tests") for p in (ROOT / folder).rglob("*.py"))
FILES += [p for p in [ROOT / "run.py"] if p.exists()]
NAMES = [str(p.relative_to(ROOT)) for p in FILES]
FILE_LINES, FUNCTION_LINES = 450, 70

EXECUTOR = {"schedules", "partition", "wire", "mesh", "precision", "remat", "losses", "sharding", "probe"}
# Which modules of jaxpp a module may import; those not named here may import any. None imports executor or train.
MAY_IMPORT = {
    "schedules": set(),
    "precision": set(),
    "kernels": set(),
    "hlo": set(),
    "trees": set(),
    "losses": {"kernels", "mesh", "sharding"},
    "mesh": set(),
    "sharding": {"mesh"},
    "exchange": {"mesh", "sharding"},
    "remat": set(),
    "probe": {"mesh"},
    "wire": EXECUTOR,
    "partition": EXECUTOR,
    "slots": EXECUTOR | {"trees"},
    "executor": EXECUTOR | {"slots", "trees"},
}


def imports(path: Path) -> set[str]:
    """Full dotted names of all that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [path.parent.name] * (node.level > 0) + [node.module] * (node.module is not None)
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def inside(path: Path, package: str) -> set[str]:
    """Modules of a package that a file imports; "" where it imports the package itself or a name of its __init__."""
    own = {p.stem for p in (ROOT / package).glob("*.py")}
    parts = [name.split(".") for name in imports(path)]
    return {p[1] if len(p) > 1 and p[1] in own else "" for p in parts if p[0] == package}


def of(folder: str) -> list[Path]:
    return [p for p in FILES if p.parent.name == folder]


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_a_module_imports_only_what_stands_below_it(module: str) -> None:
    assert inside(ROOT / "jaxpp" / f"{module}.py", "jaxpp") <= MAY_IMPORT[module]


def test_schedules_import_numpy_and_the_standard_library_alone() -> None:
    roots = {name.split(".")[0] for name in imports(ROOT / "jaxpp" / "schedules.py")}
    assert roots - {"numpy", "collections", "dataclasses", "difflib", "itertools"} == set()


@pytest.mark.parametrize("path", of("jaxpp"), ids=lambda p: p.name)
def test_the_library_knows_no_model_and_no_command_line(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots & {"models", "run", "tests"} == set()


def test_models_know_nothing_of_what_runs_them() -> None:
    reached = {path.name: inside(path, "jaxpp") & {"", "executor", "train", "plan"} for path in of("models")}
    assert {name: modules for name, modules in reached.items() if modules} == {}


@pytest.mark.parametrize("name", NAMES)
def test_no_file_is_too_long(name: str) -> None:
    lines = len((ROOT / name).read_text().splitlines())
    assert lines <= FILE_LINES


@pytest.mark.parametrize("name", NAMES)
def test_no_function_is_too_long(name: str) -> None:
    nodes = ast.walk(ast.parse((ROOT / name).read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno >= FUNCTION_LINES}
    assert long == {}
