"""docs/errors.md is made from the errors, and is current."""

from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from kvxfer import errors

SCRIPT = Path(__file__).parents[2] / "docs" / "generate_errors.py"


def generator():
    loader = SourceFileLoader("generate_errors", str(SCRIPT))
    module = ModuleType(loader.name)
    module.__file__ = str(SCRIPT)
    loader.exec_module(module)
    return module


def test_the_page_is_current():
    made = generator()
    assert made.PAGE.read_text() == made.page(), "run `make errors`"


def test_the_page_names_every_error_and_code():
    page = generator().page()
    assert all(f"`{name}`" in page for name in errors.__all__ if name != "Code")
    assert all(f"`{code.name}`" in page for code in errors.Code if code is not errors.Code.UNKNOWN)
