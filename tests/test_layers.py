"""Imports go down only: a newcomer can read the package from the bottom up."""

import ast
import re
from pathlib import Path

import tba

ROOT = Path(tba.__file__).parent
LAYERS = [
    "types",
    "config",
    "observe",
    "models",
    "objectives",
    "engine",
    "runtime",
    "tasks",
    "serve",
    "replay",
    "searcher",
    "trainer",
    "run",
    "trl",
    "cli",
    "__main__",
]


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_layers(path: Path) -> set[str]:
    layers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tba"):
            parts = node.module.split(".")
            layers |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            layers |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("tba.")}
    return layers


def test_every_file_belongs_to_a_layer():
    found = {layer_of(path) for path in ROOT.rglob("*.py") if path.name != "__init__.py" or path.parent != ROOT}
    assert found <= set(LAYERS), found - set(LAYERS)


def test_imports_go_down_only():
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path in ROOT.rglob("*.py")
        if layer_of(path) in LAYERS
        for other in imported_layers(path)
        if LAYERS.index(other) > LAYERS.index(layer_of(path))
    ]
    assert not wrong, wrong


def test_the_config_layer_needs_neither_torch_nor_transformers():
    for path in (ROOT / "config").rglob("*.py"):
        imported = re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        assert not {"torch", "transformers"} & set(imported), path


def test_the_package_needs_nothing_that_only_a_clone_has():
    for path in ROOT.rglob("*.py"):
        imported = re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        assert not {"recipes", "benchmarks", "tests"} & set(imported), path
