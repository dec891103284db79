"""The classes have what a released sglang calls and reads, with its signatures; without sglang an error says so."""

import importlib.util
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from sglang_record import read_in
from sglang_stand_in import CLASSES, RECORDED
from vllm_record import classes

from kvxfer.errors import MissingExtraError
from kvxfer.integrations import sglang
from kvxfer.integrations.sglang.meeting import Directory
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
    # context parallelism, which is refused; other backends alone call it
    ("manager", "attn_cp_rank"): "disaggregation/utils.py:filter_kv_indices_for_cp_rank",
    ("manager", "attn_cp_size"): "disaggregation/utils.py:filter_kv_indices_for_cp_rank",
    # only of a sender with `supports_host_tensor_indices`, which is asked for
    ("manager", "enable_all_cp_ranks_for_transfer"): "disaggregation/prefill.py:_send_kv_chunk",
    # only of a manager with `_prefetch_staging_reqs`, likewise
    ("manager", "transfer_infos"): "disaggregation/prefill.py:maybe_prefetch_staging_for_batch",
    # pipeline parallelism, which is refused, and of senders
    ("receiver", "poll_pp_consensus"): "disaggregation/utils.py:_poll_with_failure_injection_pp",
}
"""What schedulers read elsewhere: in this one function, and why not here."""


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
    assert ("KvxferKVReceiver", "ensure_abort_notified") in checked
    assert ("KvxferKVManager", "is_abort_release_safe") in checked
    assert ("KvxferKVSender", "send") in checked


def test_whatever_schedulers_read_is_there():
    missing = {}
    for kind, read in RECORDED["read"].items():
        if kind == "directory":
            known = {field.name for field in fields(Directory)}
        else:
            base = CLASSES[PAIRS[f"KvxferKV{kind.title()}"][0]]
            known = own(f"KvxferKV{kind.title()}") | set(base["fields"].split()) | set(base["methods"])
        missing |= {(kind, name): where for name, where in read.items() if name not in known}
    assert missing == {key: [where] for key, where in UNREAD.items()}


READ = """
def reads(self):
    manager = self.queue.kv_manager
    manager.of_a_variable
    getattr(self, "kv_manager").of_getattr
    getattr(manager, "by_getattr")
    _current_kv_manager(self).of_a_call
    self.kv_manager.called().of_what_it_gave
    if hasattr(manager, "asked"):
        manager.asked
    getattr(manager, "with_a_default", None)
    manager.written = 1
    self.sender.of_something_else


def reads_it_again(kv_mgr):
    kv_mgr.asked
"""


def test_the_record_finds_what_is_read_however_it_is_written():
    assert sorted(read_in(READ)) == [
        ("manager", "asked", "reads_it_again"),
        ("manager", "by_getattr", "reads"),
        ("manager", "called", "reads"),
        ("manager", "of_a_call", "reads"),
        ("manager", "of_a_variable", "reads"),
        ("manager", "of_getattr", "reads"),
    ]


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
