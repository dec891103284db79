"""The prefill role: what peers fetch from this rank."""
