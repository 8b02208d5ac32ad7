"""What pyproject.toml lists is what there is: a package or file that is not listed is missing from the wheel only."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
MAPPED = {"sglang_tailreplay.radix": "radix", "sglang_tailreplay.replay": "replay"}
MAPPED["sglang_tailreplay.cuda_streams"] = "cuda_streams"
NOT_PACKAGES = "sglang_tailreplay/cpu/stand_ins"  # data: put on sys.path where the real packages are missing


def folders_with_python() -> dict[str, str]:
    """Package -> folder, for every folder of the distribution that holds Python files."""
    found = {}
    for package, top in {"sglang_tailreplay": "sglang_tailreplay", **MAPPED}.items():
        for folder in {file.parent for file in (ROOT / top).rglob("*.py")}:
            inner = folder.relative_to(ROOT / top)
            if not folder.is_relative_to(ROOT / NOT_PACKAGES):
                found[".".join((package, *inner.parts))] = folder.relative_to(ROOT).as_posix()
    return found


def test_every_package_is_listed():
    assert sorted(SETUPTOOLS["packages"]) == sorted(folders_with_python())


@pytest.mark.parametrize("package, folder", sorted(folders_with_python().items()))
def test_every_package_is_found_where_it_lies(package, folder):
    assert (ROOT / folder / "__init__.py").is_file()
    mapping = SETUPTOOLS["package-dir"]
    assert mapping.get(package, package.replace(".", "/")) == folder


def test_only_the_rooms_are_mapped():
    assert SETUPTOOLS["package-dir"] == MAPPED


def test_package_data_is_every_file_that_is_no_module():
    package = ROOT / "sglang_tailreplay"
    modules = {file for file in package.rglob("*.py") if not file.is_relative_to(ROOT / NOT_PACKAGES)}
    files = {file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert list(SETUPTOOLS["package-data"]) == ["sglang_tailreplay"]
    patterns = SETUPTOOLS["package-data"]["sglang_tailreplay"]
    matched = {pattern: {file for file in package.glob(pattern) if file.is_file()} for pattern in patterns}
    assert all(matched.values()), [pattern for pattern, found in matched.items() if not found]
    assert set().union(*matched.values()) == files - modules


def test_rooms_hold_modules_only():
    for room in MAPPED.values():
        strays = [file for file in (ROOT / room).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        assert {file.suffix for file in strays} == {".py"}, "package-data names sglang_tailreplay only"


def test_the_installed_entry_point_is_the_plugin():
    (declared,) = PROJECT["project"]["entry-points"]["sglang.srt.plugins"].items()
    installed = [e for e in entry_points(group="sglang.srt.plugins") if e.name == declared[0]]
    assert {e.value for e in installed} == {declared[1]}
    assert callable(installed[0].load())


def test_the_installed_command_is_the_declared_one():
    (declared,) = PROJECT["project"]["scripts"].items()
    (installed,) = [e for e in entry_points(group="console_scripts") if e.name == declared[0]]
    assert installed.value == declared[1] and callable(installed.load())
