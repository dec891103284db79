"""The wire for people who have no Python: specification, registry, JSON Schema, and golden frames."""
