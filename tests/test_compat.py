"""The check of what is built, which `make compat` runs before it tries the packages."""

from __future__ import annotations

import pytest
from tools.built_readme import outside_of_checkout
from tools.compat import OTHER_TESTS, PYTHONS, ROOT, SMOKE, mistakes, project

pytestmark = pytest.mark.pure

TRACKED = ("Makefile", ".ci/run", "src/moored/__init__.py", "src/moored/py.typed")
WHEEL = ("moored/__init__.py", "moored/py.typed", "moored-1.dist-info/licenses/LICENSE")


def test_complete_archives_have_no_mistakes() -> None:
    assert list(mistakes(["PKG-INFO", *TRACKED], WHEEL, TRACKED)) == []


def test_what_an_archive_lacks_is_named() -> None:
    assert list(mistakes(TRACKED[1:], WHEEL, TRACKED)) == ["the sdist lacks Makefile"]
    assert list(mistakes(TRACKED, WHEEL[1:2], TRACKED)) == [
        "the wheel lacks moored/__init__.py",
        "the wheel lacks its licence",
    ]


def test_what_does_not_belong_into_the_wheel_is_named() -> None:
    (found,) = mistakes(TRACKED, [*WHEEL, "tests/test_it.py"], TRACKED)
    assert found == "the wheel has tests/test_it.py, which is not part of the package"


def test_every_extra_has_a_smoke_test() -> None:
    assert set(SMOKE) == {"", *project()["optional-dependencies"]} - {"all"}


def test_the_tests_that_it_runs_exist() -> None:
    assert all((ROOT / each).is_file() for each in OTHER_TESTS)


def test_classifiers_name_the_versions_that_are_tried() -> None:
    prefix = "Programming Language :: Python :: "
    named = [each.removeprefix(prefix) for each in project()["classifiers"] if prefix in each]
    assert tuple(named[1:]) == PYTHONS
    assert f"CPython {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "README.md").read_text()


def test_links_of_the_built_readme_work_outside_of_the_checkout() -> None:
    text = "![page](docs/page.png)\n\n[how](docs/a.md#b), [there](https://example.org/x)"
    assert outside_of_checkout(text, None) == "\n\nhow, [there](https://example.org/x)"
    assert outside_of_checkout(text, "https://example.org/m") == (
        "![page](https://example.org/m/raw/main/docs/page.png)\n\n"
        "[how](https://example.org/m/blob/main/docs/a.md#b), [there](https://example.org/x)"
    )
    assert "](docs/" not in outside_of_checkout((ROOT / "README.md").read_text(), None)
