"""What ``--list`` shows: names with one line each, importing none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from rsipo_lightning import registry
from rsipo_lightning.composing import COMPONENTS, GROUPS, component, members, yaml_file


def listing(groups: Sequence[str]) -> str:
    """These groups; per name the first comment of its YAML, else of its class's docstring."""
    return "\n".join("".join(f"{line}\n" for line in _group(group)) for group in reversed(groups))


def _group(group: str) -> Iterator[str]:
    kind = f"{GROUPS[group].kind}s"
    yield f"{kind} (--{group})"
    for name in members(group):
        text = _comment(yaml_file(group, name))
        if not text and group in COMPONENTS:
            text = _origin(registry.entry(kind, component(group, name)))
        yield f"  {name:16} {text}".rstrip()


def _comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else ""
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _origin(entry: registry.Entry) -> str:
    """First line of the class's docstring, or the package and target if it is not ours."""
    target, package = entry
    if package:
        return f"from {package} ({target})"  # finding its file would import its parents
    module, _, name = target.partition(":")
    path = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return target
