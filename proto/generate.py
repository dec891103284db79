"""Writes `schema/` and `vectors/`: `python -m proto.generate`.

The schema follows the types. Golden bytes do not: what a name stands for is never changed, so this refuses to write a
frame, a conversation or a plan that differs from the one in git. Add new names; rename what was wrong before its first
release. Only a version that speaks no older one begins with vectors of its own: who makes it removes the files of the
old ones.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proto.conversations import conversations, handshake_vector
from proto.frames import invalid, valid
from proto.plans import plans
from proto.schema import body_schema, messages_schema

HERE = Path(__file__).parent
__all__ = ["HERE", "changed_vectors", "generate", "main"]


def generate() -> dict[str, dict[str, Any]]:
    """Every generated document by its path below `proto/`."""
    return {
        "schema/messages.json": messages_schema(),
        "schema/agent_body.json": body_schema(),
        "vectors/valid.json": {"frames": valid()},
        "vectors/invalid.json": {"frames": invalid()},
        "vectors/conversations.json": conversations(),
        "vectors/handshake.json": handshake_vector(),
        "vectors/plans.json": plans(),
    }


def text(document: Mapping[str, Any]) -> str:
    """A document as it stands in git."""
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"


def changed_vectors(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names in an old vector file that are gone, or stand for something else, in the new one."""
    changed: list[str] = []
    for key, value in old.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            entries = {entry["name"]: entry for entry in new.get(key, [])}
            changed += [entry["name"] for entry in value if _golden(entries.get(entry["name"], {})) != _golden(entry)]
        elif new.get(key) != value:
            changed.append(key)
    return changed


def _golden(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What of an entry never changes; its note and the names of fields may."""
    golden = ("hex", "message", "outcome", "limit", "frames", "agreement", "digest", "bytes", "chunks")
    return {key: entry.get(key) for key in golden}


def main() -> int:
    """Write what is new; returns 1, and writes nothing, if a golden vector would change."""
    documents = generate()
    for name, document in documents.items():
        path = HERE / name
        if name.startswith("vectors/") and path.exists():
            changed = changed_vectors(json.loads(path.read_text()), json.loads(text(document)))
            if changed:
                sys.stderr.write(f"golden vectors of {name} would change: {', '.join(changed)}\n")
                return 1
    for name, document in documents.items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(document), encoding="ascii")
        sys.stdout.write(f"wrote proto/{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
