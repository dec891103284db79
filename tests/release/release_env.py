"""A source archive, a wheel made of it, and an environment that has what the wheel requires and nothing more.

What is required is found by walking metadata, and linked from where it is installed. So no package index is asked, and
a package that kvxfer needs but does not name is missing.
"""

import email
import importlib.metadata
import subprocess
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def linked(wheel, folder, *more):
    """An empty environment with links to what a wheel requires, and to more packages by name. Its site-packages."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in required(wheel, *more):
        for part in {Path(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(found.locate_file(part))
    return folder


def run(*command, **options):
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100} | options
    done = subprocess.run([str(part) for part in command], check=False, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def required(wheel, *more):
    """What a wheel requires without extras, all the way down, and more packages, as they are installed here."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        needs = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    found, waiting = {}, [(line, frozenset()) for line in (*needs, *more)]
    while waiting:
        line, extras = waiting.pop()
        need = Requirement(line)
        key = canonicalize_name(need.name), frozenset(need.extras)
        wanted = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""})
        if key in found or not wanted:
            continue
        found[key] = importlib.metadata.distribution(need.name)
        waiting.extend((line, key[1]) for line in found[key].requires or ())
    return found.values()
