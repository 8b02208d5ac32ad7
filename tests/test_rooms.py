"""Who may import whom, and what no file may contain."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "sglang_tailreplay"
ROOMS = ("radix", "replay", "cuda_streams")
SKIPPED = {".git", ".venv", "build", ".gpu", "__pycache__"}


def files() -> Iterator[Path]:
    """Files of the repository, relative to it: not what tools and builds leave beside them."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED
            and not name.endswith((".egg-info", "_cache"))
            and name != ".hypothesis"
            and not (Path(folder, name) / "pyvenv.cfg").exists()
        ]
        yield from (Path(folder, name).relative_to(ROOT) for name in names if Path(folder, name).is_file())


def python_files() -> list[Path]:
    return sorted(path for path in files() if path.suffix == ".py")


def imports(source: str, package: str = "") -> Iterator[str]:
    """Dotted names that the module imports, with `from a import b` as a.b; relative ones seen from package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> str:
    inner = ".".join(path.parent.parts)
    return f"{PACKAGE}.{inner}" if path.parts[0] in ROOMS else inner


def imported(path: Path) -> set[str]:
    return set(imports((ROOT / path).read_text(), package_of(path)))


def within(names: set[str], *packages: str) -> list[str]:
    return sorted(name for name in names if any(name == p or name.startswith(f"{p}.") for p in packages))


def modules(folder: str) -> list[Path]:
    return [path for path in python_files() if path.parts[0] == folder]


def test_the_finder_sees_every_kind_of_import():
    source = "import a.b, c as d\nfrom e import f\nfrom . import g\nfrom ..h import i\ndef _():\n    import j\n"
    assert list(imports(source, "p.q")) == ["a.b", "c", "e.f", "p.q.g", "p.h.i", "j"]
    assert all(modules(folder) for folder in (*ROOMS, PACKAGE, "tests", "scripts"))


@pytest.mark.parametrize("path", modules("replay") + modules("cuda_streams"), ids=str)
def test_replay_and_cuda_streams_import_only_themselves(path):
    names = imported(path)
    own = f"{PACKAGE}.{path.parts[0]}"
    assert within(names, "sglang") == []
    assert [name for name in within(names, PACKAGE) if not within({name}, own)] == []


@pytest.mark.parametrize("path", modules("radix"), ids=str)
def test_radix_imports_neither_the_other_rooms_nor_the_integration(path):
    assert [name for name in within(imported(path), PACKAGE) if not within({name}, f"{PACKAGE}.radix")] == []


@pytest.mark.parametrize("name", ["rows.py", "boundary.py"])
def test_pure_integers_stay_pure(name):
    """Their imports, and those of what they import, are the standard library and numpy."""
    todo, seen = [Path("radix", name)], set()
    while todo:
        path = todo.pop()
        seen.add(path)
        names = imported(path)
        assert within(names, "torch", "sglang", "triton") == []
        own = {Path("radix", f"{name.split('.')[2]}.py") for name in within(names, f"{PACKAGE}.radix")}
        todo += [path for path in own - seen if (ROOT / path).exists()]


def test_only_the_integration_and_the_tree_import_sglang():
    """Tests and scripts, which are not installed, may."""
    users = {path.parts[0] for path in python_files() if within(imported(path), "sglang")}
    assert users <= {PACKAGE, "radix", "tests", "scripts"}


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_nobody_imports_a_room_by_its_folder(path):
    assert within(imported(path), *ROOMS) == [], f"import {PACKAGE}.<room>: the folder's name makes second classes"


def test_no_file_names_a_folder_of_the_machine_it_was_written_on():
    forbidden = ["/" + "work/", "../" + "shared"]
    found = [f"{path}: {text}" for path in files() for text in forbidden if text.encode() in (ROOT / path).read_bytes()]
    assert found == []
