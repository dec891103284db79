"""A check that breaks is a finding too."""

from dataclasses import asdict

from kvxfer.tools.doctor.findings import Status, ok, said


def test_what_a_check_says_is_passed_on_until_it_breaks():
    def check():
        yield ok("a", "well", gbps=1.5)
        raise OSError("no such\nthing")

    first, second = said("b", check)
    assert asdict(first) == {"name": "a", "status": "ok", "seen": "well", "remedy": "", "facts": {"gbps": 1.5}}
    assert (second.name, second.status) == ("b", Status.FAIL)
    assert second.seen == "the check broke: OSError: no such thing"
    assert second.remedy
