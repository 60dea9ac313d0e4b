"""What the documents promise exists, and each module says what it is for."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

MAX_LINES = 450


def blocks(text: str) -> list[str]:
    """The lines of all fenced code blocks."""
    found = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    return [line for block in found for line in block.splitlines()]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_in_documents_exist(root: Path, document: str) -> None:
    text = (root / document).read_text(encoding="utf-8")
    used = set(re.findall(r"`make ([a-z-]+)", text))
    used |= {m[1] for line in blocks(text) if (m := re.match(r"make ([a-z-]+)", line))}
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.M)
    rules = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    assert set(phony.split()) == rules
    assert used and used <= rules


def test_readme_opens_with_the_two_commands(root: Path) -> None:
    code = blocks((root / "README.md").read_text(encoding="utf-8"))
    assert [line.split("#")[0].strip() for line in code[:2]] == ["make compare", "make test"]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_resolve(root: Path, document: str) -> None:
    text = (root / document).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]*)?\)", text)
    local = [link for link in links if "://" not in link]
    assert local and [link for link in local if not (root / link).exists()] == []


def test_extras_in_readme_exist(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = re.findall(r"EXTRAS=([a-z]+)|\.\[([a-z,]+)\]", (root / "README.md").read_text())
    names = {name for pair in used for part in pair for name in part.split(",") if name}
    assert {"cuda", "tpu"} <= names <= set(extras)


def test_every_corpus_is_named_in_the_notice(root: Path) -> None:
    notice = (root / "NOTICE").read_text(encoding="utf-8")
    folders = sorted(p.name for p in (root / "train/data/corpora").iterdir() if p.is_dir())
    assert "austen" in folders
    assert [f for f in folders if f"train/data/corpora/{f}/" not in notice] == []


def test_every_module_has_a_docstring(root: Path, modules: list[Path]) -> None:
    trees = {p: ast.parse((root / p).read_text(encoding="utf-8")) for p in modules}
    assert [str(p) for p, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_files_are_short_or_say_why_not(root: Path, modules: list[Path]) -> None:
    """A file over 450 lines gives its reason in its docstring: "One file because ..."."""
    long = []
    for path in modules:
        text = (root / path).read_text(encoding="utf-8")
        reason = "One file because" in (ast.get_docstring(ast.parse(text)) or "")
        if text.count("\n") > MAX_LINES and not reason:
            long.append(str(path))
    assert long == []


def test_no_file_names_one_machine(root: Path, package_files: list[Path]) -> None:
    """No absolute path of somebody's home or scratch folder is left in the package."""
    place = re.compile(r"""["'\s(=](/home|/root|/Users|/work|/tmp)/\w""")
    text = [p for p in package_files if p.suffix in (".py", ".yaml", ".j2", ".md", ".json")]
    found = [str(p) for p in text if place.search((root / p).read_text(encoding="utf-8"))]
    assert found == []


def test_readme_explains_every_key_of_the_results(root: Path) -> None:
    from genlab.eval.results import Results, Row

    text = (root / "README.md").read_text(encoding="utf-8")
    tables = text[text.index("## results.json") : text.index("## Layout")]
    explained = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\|([^|]*)\|", tables, re.M))))
    assert explained == {*Results.model_fields, *Row.model_fields}
