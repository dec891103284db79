"""Sabotage: without any one of the guards of memory its check goes wrong, and with all of them it does not."""

import pytest
from guards import GUARDS, SEEDS

CHECKS = {guard.check: guard.name for guard in GUARDS}
"""What is checked, and a guard that it is about: some have the same check, which needs to pass once."""


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for check, name in CHECKS.items()])
def test_its_check_passes_while_it_stands(check, tmp_path):
    for seed in SEEDS:
        check(tmp_path, seed)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_its_check_goes_wrong_without_it(guard, tmp_path, monkeypatch):
    guard.remove(monkeypatch)
    assert any(goes_wrong(guard, tmp_path, seed) for seed in SEEDS)


def goes_wrong(guard, folder, seed):
    """By its own verdict, or by that of the ledger: any other error comes out."""
    try:
        guard.check(folder, seed)
    except (AssertionError, pytest.fail.Exception):
        return True
    return False
