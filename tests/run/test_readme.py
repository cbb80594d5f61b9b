"""README.md: its Python example runs as it stands, and what it names is there."""

import ast
import re
import sys
from pathlib import Path

import pytest
from commands import run_command

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notes").glob("*.md"))]


@pytest.mark.slow
def test_the_python_example_trains_as_it_stands(tmp_path):
    """But for the number of steps: the last ones do what the first ones do."""
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    script, replaced = re.subn(r"\bmax_steps=\d+", "max_steps=3", example.group(1))
    assert replaced == 1
    (tmp_path / "example.py").write_text(script)
    done = run_command([sys.executable, "example.py"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    final = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert 0.0 <= final["accuracy"] <= 1.0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_to_a_file_and_its_heading(document):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors_of(file.read_text(encoding="utf-8")), f"{document.name} links to {target}"


def anchors_of(text: str) -> set[str]:
    """GitHub's anchors: headings in small letters, without punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_config_that_the_readme_names_is_there():
    named = set(re.findall(r"(?:configs|benchmarks|examples)/[\w/]+\.(?:yaml|py)", (ROOT / "README.md").read_text()))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
