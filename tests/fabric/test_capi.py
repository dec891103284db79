"""NIXL's C library: which wheel is taken, what is refused, and what an agent must prove."""

import importlib.util
from pathlib import Path

import pytest

from kvxfer.errors import FabricError, MissingExtraError
from kvxfer.fabric import nixl
from kvxfer.fabric.nixl import CallError, Capi, Wheel

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

# ---- which wheel -----------------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Pretend that wheels are installed, by their versions, and that torch is built for some CUDA."""

    def pretend(cuda="", **versions):
        library = tmp_path / "libnixl_capi.so"
        library.touch()
        wheels = {name: Wheel(f"nixl-{name}", version, library) for name, version in versions.items()}
        monkeypatch.setattr(nixl, "_installed", lambda name: wheels.get(name.removeprefix("nixl-")))
        monkeypatch.setattr(nixl, "_cuda_major", lambda: cuda)
        return library

    return pretend


@pytest.mark.parametrize(
    ("cuda", "versions", "found"),
    [
        ("13", {"cu12": "1.5.1", "cu13": "1.5.1"}, "nixl-cu13"),
        ("12", {"cu12": "1.5.1", "cu13": "1.5.1"}, "nixl-cu12"),
        ("12", {"cu12": "1.5.0", "cu13": "1.6.0"}, "nixl-cu12"),
        ("", {"cu12": "1.5.1"}, "nixl-cu12"),
        ("", {"cu12": "1.5.1", "cu13": "1.5.12"}, "nixl-cu13"),
    ],
)
def test_the_wheel_is_that_of_torchs_cuda_or_any_without(install, cuda, versions, found):
    install(cuda, **versions)
    assert nixl.find().name == found


@pytest.mark.parametrize(
    ("cuda", "versions", "words"),
    [
        ("13", {}, r"pip install 'nixl>=1\.5,<1\.6'"),
        ("13", {"cu12": "1.5.1"}, r"CUDA 13, and of NIXL only nixl-cu12 is installed: pip install 'nixl-cu13"),
        ("12", {"cu12": "1.6.0"}, r"knows .* NIXL 1\.5, and nixl-cu12 1\.6\.0 is installed \(.*libnixl_capi\.so\)"),
        ("", {"cu12": "1.50.0"}, r"nixl-cu12 1\.50\.0"),
        ("", {"cu13": "0.9.0"}, r"nixl-cu13 0\.9\.0 .*: pip install 'nixl>=1\.5,<1\.6'"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(install, cuda, versions, words):
    install(cuda, **versions)
    with pytest.raises(MissingExtraError, match=words):
        nixl.find()


def test_a_wheel_without_the_library_is_named_with_its_place(install):
    install(cu13="1.5.1").unlink()
    with pytest.raises(MissingExtraError, match=r"nixl-cu13 1\.5\.1 .*libnixl_capi\.so: pip install --force-reinstall"):
        nixl.find()


def test_the_version_that_is_known_is_the_one_that_the_package_requires():
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    major, minor = nixl.KNOWN
    assert f'"nixl>={major}.{minor},<{major}.{minor + 1}"' in text
    assert f"nixl>={major}.{minor},<{major}.{minor + 1}" in nixl._INSTALL


# ---- the library -----------------------------------------------------------------------------------------------------


def test_a_library_without_its_functions_is_refused_with_their_names():
    with pytest.raises(FabricError, match=r"libm\.so\.6 \(nixl-cu13 1\.5\.1\) lacks nixl_capi_create_configured_agent"):
        Capi(Wheel("nixl-cu13", "1.5.1", Path("libm.so.6")))


def test_a_file_that_is_no_library_is_refused(tmp_path):
    file = tmp_path / "libnixl_capi.so"
    file.write_text("not ELF")
    with pytest.raises(FabricError, match=r"cannot be opened: .*libnixl_capi\.so"):
        Capi(Wheel("nixl-cu12", "1.5.1", file))


@pytest.fixture
def library():
    """The library, with one agent and its backend."""
    made = Capi(nixl.find())
    agent = made.agent("a")
    backend = made.backend(agent, "UCX", {})
    yield made, agent, backend
    del backend
    made.destroy_agent(agent)


@needs_nixl
def test_an_agent_proves_that_it_writes(library):
    made, agent, backend = library
    for _ in range(2):
        made.prove(agent, "a", backend)


@needs_nixl
@pytest.mark.parametrize("order", [("POSIX", "UCX"), ("UCX", "POSIX")])
def test_an_agent_proves_it_by_the_backend_that_was_named(order):
    made = Capi(nixl.find())
    agent = made.agent("a")
    try:
        if "POSIX" not in made.plugins(agent):
            pytest.skip("this NIXL is packed without a second backend that takes memory of the host")
        backends = {name: made.backend(agent, name, {}) for name in order}
        made.prove(agent, "a", backends["UCX"])
        del backends
    finally:
        made.destroy_agent(agent)


def refused(*_):
    raise CallError("call", -2)


@needs_nixl
@pytest.mark.parametrize(
    ("does", "words"),
    [
        (lambda made, agent: {"post_xfer_req": refused}, r"failed \(call: NIXL_CAPI_ERROR_BACKEND\)"),
        (lambda made, agent: {"register_mem": refused}, "failed"),
        (lambda made, agent: {"create_xfer_req": refused}, "failed"),
        (lambda made, agent: {"get_xfer_status": lambda *_: nixl.IN_PROGRESS}, "took over 0.2 s"),
        (lambda made, agent: {"opt_args_set_has_notif": lambda *_: 0}, "took over 0.2 s"),
        (lambda made, agent: {"_cause": lambda *_: 0}, "was at 0 before it was posted"),
        (
            lambda made, agent: {
                "post_xfer_req": lambda *_: made.gen_notif(agent, b"a", nixl._PROOF, 64, None),
                "get_xfer_status": lambda *_: 0,
            },
            "wrote other bytes",
        ),
        (
            lambda made, agent: {
                "opt_args_set_notif_msg": lambda options, *_, call=made.opt_args_set_notif_msg: call(options, b"no", 2)
            },
            r"was announced as \(b'a', b'no'\)",
        ),
    ],
)
def test_an_agent_that_does_something_else_is_found_out(library, monkeypatch, does, words):
    made, agent, backend = library
    monkeypatch.setattr(nixl, "_PROOF_S", 0.2)
    with monkeypatch.context() as patch:
        for name, function in does(made, agent).items():
            patch.setattr(made, name, function)
        with pytest.raises(FabricError, match=rf"libnixl_capi\.so .*to itself {words}.*pip install --force-reinstall"):
            made.prove(agent, "a", backend)
    made.prove(agent, "a", backend)


@needs_nixl
def test_parameters_are_read_back_and_unknown_peers_forgotten(library):
    made, agent, _ = library
    other = made.agent("b")
    backend = made.backend(other, "UCX", {"num_workers": "2", "ucx_error_handling_mode": "peer"})
    params = made.backend_params(other, backend)
    assert (params["num_workers"], params["ucx_error_handling_mode"]) == ("2", "peer")
    assert "UCX" in made.plugins(agent)
    made.forget(agent, "nobody")
    del backend
    made.destroy_agent(other)
