"""Every log call says what happened in snake_case and the past tense, with keys from the one list."""

import ast
import re
from pathlib import Path

from test_layers import name  # pyright: ignore[reportMissingImports]

from kvxfer.telemetry import TransferStats

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "kvxfer").rglob("*.py"))
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
OTHERS = {"bind", "new", "unbind", "msg", "log", "warn", "fatal"}
LOGGERS = {"log", "_log", "logger", "_logger"}
KEYS = {
    # who and what
    "address", "agent", "backend", "backends", "cpus", "device", "endpoint", "engine", "epoch", "group", "incarnation",
    "kind", "message", "name", "offer", "peer", "peers", "rank", "request", "role", "task", "ticket", "transfer",
    "version", "world",
    # what happened
    "attempt", "blocks", "chunk", "code", "environment", "error", "field", "fields", "limit", "memory_safe", "outcome",
    "path", "reason", "route", "setting", "state", "step", "value", "why",
    # how much
    "bytes", "chunks", "chunks_done", "count", "descriptors", "dropped", "failures", "gbps", "pieces",
    "quarantined_bytes", "tokens",
    # how long, in seconds
    "duration", "elapsed", "first_byte_after", "gathering", "lag", "posting", "predicted", "queued", "remaining",
    "scattering", "timeout", "wire",
    # handed on to the stdlib logger
    "exc_info", "stack_info",
}  # fmt: skip
"""Every key that a log line may have."""
PAST = {"print", "logging.getLogger", "structlog.get_logger", "structlog.stdlib.get_logger"}
IRREGULAR = re.compile(
    r"became|began|broke|broken|built|came|cast|chose|chosen|cut|died|done|drawn|drew|fell|found|"
    r"froze|gave|given|gone|got|grew|heard|held|hit|hung|kept|knew|left|let|lost|made|met|paid|"
    r"put|quit|ran|read|rebuilt|rose|said|sat|saw|sent|set|shown|shut|spent|split|stood|stuck|"
    r"taken|thrown|told|took|went|withdrawn|woke|won|written"
)


def is_logger(node):
    """`_log`, `self._log`, `_log()`, `_log.bind(...)`."""
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "bind":
            function = function.value
        return is_logger(function)
    last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return last.lower() in LOGGERS


def is_method(node, names):
    return isinstance(node, ast.Attribute) and node.attr in names and is_logger(node.value)


def log_calls(tree):
    """(call, method) of every call that logs or binds, also through a name as in `say = _log.info if ...`."""
    said = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(is_method(inner, LEVELS) for inner in alternatives(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in said:
                yield node, "info"
            elif isinstance(function, ast.Attribute) and is_method(function, LEVELS | OTHERS):
                yield node, function.attr


def alternatives(node):
    """The values that an expression may have, as far as `a if b else c` goes."""
    return [*alternatives(node.body), *alternatives(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def past_tense(event):
    return any(word.endswith("ed") or IRREGULAR.fullmatch(word) for word in event.split("_"))


def problems(tree):
    for node, method in log_calls(tree):
        here = f"line {node.lineno}"
        if method in LEVELS:
            for value in alternatives(node.args[0]) if len(node.args) == 1 else [None]:
                event = value.value if isinstance(value, ast.Constant) else None
                if not isinstance(event, str):
                    yield f"{here}: a log call has one positional argument, the event as a literal"
                elif not re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", event) or not past_tense(event):
                    yield f"{here}: {event!r} is not snake_case in the past tense, as in 'peer_lost'"
        elif method != "bind":
            yield f"{here}: {method} is not a way to log"
        for keyword in node.keywords:
            if keyword.arg is None:
                if not ast.unparse(keyword.value).endswith(".log_fields()"):
                    yield f"{here}: only the result of log_fields() is spread into a log call"
            elif keyword.arg not in KEYS:
                yield f"{here}: {keyword.arg!r} is not in KEYS"


def test_log_calls():
    assert [(name(path), problem) for path in MODULES for problem in problems(ast.parse(path.read_text()))] == []


def test_the_rule_sees_what_it_forbids():
    lines = [
        "_log.info('peer lost', peer=1)",
        "_log.info('PeerLost', peer=1)",
        "_log.info('losing_peer', peer=1)",
        "_log.info('peer_lost', pear=1)",
        "_log.info(f'peer_{x}')",
        "_log.info('peer_lost', peer)",
        "_log.info('peer_lost', **anything)",
        "self._log.bind(pear=1)",
        "_log.msg('peer_lost')",
        "_log().info('losing_peer')",
        "_LOG.info('peer_lost', pear=1)",
        "_log.info('peer_lost' if ok else 'losing_peer')",
        "say = _log.info if ok else _log.warning\nsay('losing_peer')",
    ]
    assert [line for line in lines if len(list(problems(ast.parse(line)))) != 1] == []


def test_the_rule_leaves_good_calls_alone():
    good = [
        "_log.info('transfer_finished', peer=1, **stats.log_fields())",
        "log.bind(peer=2).error('task_failed', task=t)",
    ]
    assert list(problems(ast.parse("\n".join([*good, "self.log.append(1)", "say('anything')"])))) == []


def test_stats_log_listed_keys_only():
    stats = TransferStats(route="staged", started=1.0, first_byte=2.0, finished=3.0, predicted=1.5)
    assert set(stats.log_fields()) <= KEYS
    assert not KEYS & {"event", "level", "timestamp", "logger"}, "which structlog needs"


def test_nothing_prints_or_logs_past_telemetry():
    past = {
        f"{name(path)}:{node.lineno}"
        for path in MODULES
        if path.name not in {"telemetry.py", "cli.py"}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PAST
    }
    assert past == set(), "use kvxfer.telemetry.logger: it is silent by default"
