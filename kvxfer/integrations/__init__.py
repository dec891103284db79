"""Adapters to model libraries and inference engines; each module needs the library that it is named after."""
