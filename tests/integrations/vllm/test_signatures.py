"""The connector has the methods that a released vLLM calls, with its signatures; without vLLM an error says so."""

import importlib.util
from pathlib import Path

import pytest
import vllm_stand_in
from vllm_record import classes

from kvxfer.errors import MissingExtraError
from kvxfer.integrations import vllm

BASE = {
    name: signature
    for base in ("KVConnectorBase_V1", "SupportsHMA")
    for name, signature in vllm_stand_in.RECORDED[base]["methods"].items()
}
SOURCE = Path(vllm.__file__).with_name("connector.py").read_text()
OURS = classes(SOURCE)["KvxferConnector"]["methods"]


def test_every_abstract_method_is_there():
    assert {name for name, signature in BASE.items() if signature.startswith("abstract")} <= set(OURS)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("KvxferStats", "KVConnectorStats"), ("KvxferPromMetrics", "KVConnectorPromMetrics")]
)
def test_metrics_have_the_methods_of_vllm(ours, theirs):
    public = {
        name: said for name, said in classes(SOURCE)[ours]["methods"].items() if name[0] != "_" or name == "__init__"
    }
    assert public.items() <= vllm_stand_in.RECORDED[theirs]["methods"].items()


@pytest.mark.parametrize("name", sorted(OURS))
def test_signatures_are_those_of_vllm(name):
    assert name in BASE, "vLLM would never call it"
    assert OURS[name] == BASE[name].removeprefix("abstract ")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_says_what_to_install():
    with pytest.raises(MissingExtraError, match="pip install vllm"):
        _ = vllm.KvxferConnector
    with pytest.raises(AttributeError, match="nonsense"):
        _ = vllm.nonsense
