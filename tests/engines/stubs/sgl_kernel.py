"""In place of sglang's kernels, which no package has for CPUs: without AMX sglang does in torch what they would.

Whatever is imported is found, and cannot be called.
"""

import sys


class _Missing:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(self._name)


def __getattr__(name):
    return getattr(_Missing(__name__), name)


__version__ = "0.28.0"  # of torchvision, which transformers asks for
for _inner in (
    "",
    ".elementwise",
    ".flash_attn",
    ".kvcacheio",
    ".quantization",
    ".scalar_type",
    ".speculative",
    ".utils",
):
    sys.modules[f"sgl_kernel{_inner}"] = sys.modules[__name__]
for _inner in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
    sys.modules[f"torchvision{_inner}"] = sys.modules[__name__]
