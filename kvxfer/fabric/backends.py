"""Settings of NIXL's backends: checked here, since its UCX backend ignores what it does not know."""

from collections.abc import Mapping, Sequence
from typing import Final

from kvxfer.errors import ConfigError

__all__ = ["checked_params", "device_params", "shown_params"]

_UCX_PARAMS: Final = frozenset({
    "device_list", "engine_config", "num_threads", "num_workers", "split_batch_size", "ucx_devices",
    "ucx_error_handling_mode", "ucx_num_device_channels",
})  # fmt: skip
"""What NIXL 1.5's UCX backend reads. It advertises only three of them."""


def checked_params(
    backends: Sequence[str],
    given: Mapping[str, Mapping[str, object]],
    num_workers: int | None,
    devices: Sequence[str],
    named: str | None,
) -> dict[str, dict[str, str]]:
    """Check the settings of NIXL's backends and write them as it takes them.

    Args:
        backends: Plugins to load.
        given: Parameters by backend.
        num_workers: UCX workers; None leaves NIXL's default.
        devices: Network devices that UCX may use, by its names; empty: all.
        named: Those that the environment names (`UCX_NET_DEVICES`), which win.

    Returns:
        Parameters by backend.

    Raises:
        ConfigError: A setting is malformed, or contradicts another.
    """
    if not backends or len(set(backends)) != len(backends):
        raise ConfigError(f"backends must name at least one NIXL plugin, each once: {list(backends)}")
    if unknown := set(given) - set(backends):
        raise ConfigError(f"backend_params names {sorted(unknown)}, which backends={list(backends)} does not load")
    params: dict[str, dict[str, str]] = {backend: {} for backend in backends}
    for backend, values in given.items():
        for key, value in values.items():
            if not isinstance(value, str):
                raise ConfigError(f"backend_params[{backend!r}][{key!r}] must be a string, not {type(value).__name__}")
            params[backend][key] = value
    if unknown := set(params.get("UCX", {})) - _UCX_PARAMS:
        raise ConfigError(f"NIXL's UCX backend has no {sorted(unknown)}; it has {sorted(_UCX_PARAMS)}")
    derived = device_params(devices, named)
    if num_workers is not None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
        derived["num_workers"] = str(num_workers)
    if derived and "UCX" not in params:
        raise ConfigError(f"num_workers and devices are settings of UCX, which backends={list(backends)} does not load")
    if twice := set(derived) & set(params.get("UCX", {})):
        raise ConfigError(f"{sorted(twice)} is given twice, in backend_params and as a setting of its own")
    if derived:
        params["UCX"] |= derived
    return params


def device_params(devices: Sequence[str], named: str | None) -> dict[str, str]:
    """How to say `devices` to NIXL's UCX backend.

    `device_list` appends ":1" to each name, so it can say first ports of RDMA devices and nothing else. `engine_config`
    is cut at commas, so it can say one device, and yields to a `UCX_NET_DEVICES` in the environment.
    """
    if not devices:
        return {}
    if any(not name or "," in name or " " in name for name in devices):
        raise ConfigError(f"devices takes UCX device names without commas or spaces, got {list(devices)}")
    if all(name.endswith(":1") for name in devices):
        return {"device_list": ",".join(name.removesuffix(":1") for name in devices)}
    if len(devices) > 1:
        raise ConfigError(
            f"devices={list(devices)}: NIXL takes first ports of RDMA devices ('mlx5_0:1') or one other device; "
            f"for more, set UCX_NET_DEVICES={','.join(devices)} and leave devices empty"
        )
    if named not in (None, devices[0]):
        raise ConfigError(f"devices={list(devices)}, but UCX_NET_DEVICES={named} would win")
    return {"engine_config": f"NET_DEVICES={devices[0]}"}


def shown_params(params: Mapping[str, Mapping[str, str]]) -> dict[str, object]:
    """Parameters by backend as logs and errors may show them: of UCX with their values, of others only the names.

    UCX has no parameter that is a secret; other backends do, such as the keys of an object store.
    """
    return {backend: dict(given) if backend == "UCX" else sorted(given) for backend, given in params.items()}
