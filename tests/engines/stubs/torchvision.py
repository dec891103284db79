"""Likewise of torchvision, whose package wants a GPU: sglang and transformers import it for pictures."""

import sgl_kernel  # noqa: F401  # pyright: ignore[reportMissingImports] - takes its place
