"""Every block of the tutorial, after what the start page installs, in an environment that has what that requires."""

import venv

import pytest

from tests.docs.blocks import blocks, play, shell
from tests.release.release_env import ROOT, linked


@pytest.mark.timeout(300)  # it installs a package and imports torch in seven processes
def test_the_tutorial_runs_as_it_stands(sdist, wheel, outside, tmp_path):
    page = (ROOT / "docs/tutorial.md").read_text()
    folder = linked(wheel, tmp_path / "env", "hatchling")
    venv.create(folder, symlinks=True, with_pip=True)
    offline = {f"PIP_{name}": "1" for name in ("NO_INDEX", "DISABLE_PIP_VERSION_CHECK", "QUIET")}
    offline["PIP_NO_BUILD_ISOLATION"] = "0"  # pip's word for: take the hatchling that is there
    variables = outside | offline | {"PATH": f"{folder}/bin:{outside['PATH']}", "PYTHONPATH": ""}
    install = next(block.text for block in blocks((ROOT / "docs/index.md").read_text()) if "pip install" in block.text)
    shell(install.splitlines()[0], sdist, variables)
    commands = [block for block in blocks(page) if block.language == "sh"]
    programs = {block.title for block in blocks(page) if block.language == "python"}
    assert play(page, sdist, variables, every=True) == len(commands)
    assert programs <= {word for block in commands for word in block.text.split()}, "each program is run by a command"
