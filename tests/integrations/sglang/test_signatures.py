"""The classes have what a released sglang calls and reads, with its signatures; without sglang an error says so."""

import importlib.util
import tomllib
from pathlib import Path

import pytest
from sglang_stand_in import CLASSES, RECORDED
from vllm_record import classes

from kvxfer.errors import MissingExtraError
from kvxfer.integrations import sglang
from kvxfer.integrations.sglang.rooms import Poll

OURS = classes(Path(sglang.__file__).with_name("conn.py").read_text())
PAIRS = {
    "KvxferKVManager": ("BaseKVManager", "CommonKVManager"),
    "KvxferKVSender": ("BaseKVSender", "CommonKVSender"),
    "KvxferKVReceiver": ("BaseKVReceiver", "CommonKVReceiver"),
    "KvxferKVBootstrapServer": ("BaseKVBootstrapServer",),
}
METHODS = [
    (ours, base, name)
    for ours, bases in PAIRS.items()
    for base in bases
    for name in CLASSES[base]["methods"]
    if name in OURS[ours]["methods"]
]
UNREAD = {
    "manager": {
        "_ensure_prefill_recompute_executor",  # for a retracted request, whose receiver has been refused before
        "_staging_handler",  # staging buffers, of which `enable_staging` says that there are none
        "attn_cp_rank",  # context parallelism, which is refused
        "attn_cp_size",
        "enable_all_cp_ranks_for_transfer",
        "set_kv_buffer_tensors",  # staging again; asked for by `hasattr`
        "transfer_infos",
    },
    "sender": set(),
    "receiver": set(),
}
"""What schedulers read elsewhere, and why not here."""


def own(name):
    return set(OURS[name]["fields"].split()) | set(OURS[name]["methods"])


@pytest.mark.parametrize("name", PAIRS)
def test_every_abstract_method_is_there(name):
    base = CLASSES[PAIRS[name][0]]["methods"]
    assert {method for method, signature in base.items() if signature.startswith("abstract")} <= set(
        OURS[name]["methods"]
    )


@pytest.mark.parametrize(("ours", "base", "name"), METHODS, ids=lambda part: part)
def test_signatures_are_those_of_sglang(ours, base, name):
    assert OURS[ours]["methods"][name] == CLASSES[base]["methods"][name].removeprefix("abstract ")


def test_every_method_that_is_checked_is_found():
    checked = {(ours, name) for ours, _, name in METHODS}
    assert ("KvxferKVReceiver", "query_prefill_dp_ranks") in checked
    assert ("KvxferKVManager", "is_abort_release_safe") in checked
    assert ("KvxferKVSender", "send") in checked


@pytest.mark.parametrize("kind", UNREAD)
def test_whatever_schedulers_read_is_there(kind):
    name = f"KvxferKV{kind.title()}"
    base = CLASSES[PAIRS[name][0]]
    known = own(name) | set(base["fields"].split()) | set(base["methods"])
    assert set(RECORDED["read"][kind]) - known == UNREAD[kind]


def test_numbers_are_those_of_sglang():
    theirs = CLASSES["KVPoll"]["values"]
    names = {"FAILED": "Failed", "BOOTSTRAPPING": "Bootstrapping", "WAITING": "WaitingForInput"}
    names |= {"TRANSFERRING": "Transferring", "SUCCESS": "Success"}
    assert {names[state.name]: state.value for state in Poll} == theirs


def test_fields_that_are_read_of_the_arguments_exist():
    source = "".join(path.read_text() for path in Path(sglang.__file__).parent.glob("*.py"))
    for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens", "kv_layer_ids", "aux_data_ptrs", "aux_item_lens"):
        assert f"args.{name}" in source
        assert name in CLASSES["KVArgs"]["fields"].split()
    optional = {"state_types", "num_draft_entries", "kv_layout", "mla_compression_ratios", "prefill_start_layer"}
    assert optional | {"total_kv_head_num", "system_dp_rank", "gpu_id"} <= set(CLASSES["KVArgs"]["fields"].split())


def test_sglang_finds_the_plugin_by_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"sglang.srt.plugins": {"kvxfer": "kvxfer.integrations.sglang:plugin"}}
    assert set(CLASSES["HookType"]["values"]) >= {"AROUND"}
    assert RECORDED["functions"]["get_kv_class"] == ["transfer_backend", "class_type"]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="sglang is installed here")
def test_without_sglang_the_error_says_what_to_install():
    with pytest.raises(MissingExtraError, match="pip install sglang"):
        _ = sglang.KvxferKVManager
    with pytest.raises(MissingExtraError, match="pip install sglang"):
        sglang.plugin()
    with pytest.raises(AttributeError, match="nonsense"):
        _ = sglang.nonsense
