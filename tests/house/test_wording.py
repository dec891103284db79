"""Nothing in the repository speaks of the place or the way in which it was made."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = {"__pycache__", "build", "dist"}
# written in pieces, or this file would contain what it forbids
HOSTS = "|".join(
    map(re.escape, ["py" + "pi.org", "python" + "hosted.org", "ana" + "conda.org", "npm" + "js.org", "npm" + "js.com"])
)
FORBIDDEN = {
    "an issue number": re.compile(r"(?<![\w&#/(])#\d{1,5}\b(?!\w)|\b(?:issue|pull request|PR) #?\d+\b", re.IGNORECASE),
    "a path of one machine": re.compile(r"(?<![\w.])/" + r"(?:work|root)/"),
    "a package registry's host": re.compile(HOSTS, re.IGNORECASE),
    "a note to oneself": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b"),
}


def tracked():
    """Files that are tracked or would be; without git (in a source archive) all but hidden ones and what was built."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
        names = [name for name in done.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        found = [path.relative_to(ROOT) for path in ROOT.rglob("[!.]*")]
        names = [str(path) for path in found if not BUILT & set(path.parts) and path.parts[0][0] != "."]
    return sorted(name for name in set(names) if (ROOT / name).is_file())


def found(text):
    return [
        f"line {number}: {what}: {match[0]!r}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if (match := pattern.search(line))
    ]


def test_wording():
    texts = {name: data.decode() for name in tracked() if b"\0" not in (data := (ROOT / name).read_bytes())}
    assert [(name, wrong) for name, text in texts.items() for wrong in found(text)] == []


def test_the_rule_sees_what_it_forbids():
    texts = [
        "see #" + "12",
        "closes iss" + "ue 7",
        "as in Iss" + "ue #" + "7",
        "cd /" + "work/main",
        "https://py" + "pi.org/simple",
        "# TO" + "DO: later",
    ]
    assert [text for text in texts if len(found(text)) != 1] == []
    assert found("color: #123456, a session of the protocol, docs/page.md#12-more, the worker/rank") == []
