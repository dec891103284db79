"""Counts of one side of a transfer, and their sum over ranks."""

from kvxfer.site import Tally


def test_stages_are_unions_and_ranks_are_summed():
    one, other = Tally(), Tally()
    one.add_stages(("wire", 1.0, 3.0))
    one.add_stages(("wire", 2.0, 4.0))
    one.add_stages(("gathering", 5.0, 4.0))  # the other side's clock, about: an interval that ends too soon is empty
    one.first_byte, other.first_byte = 1.0, 0.25
    one.bytes, one.pieces, one.chunks, one.descriptors = 1, 2, 3, 4
    other.add_stages(("wire", 3.5, 5.0))
    other.add_stages(("scattering", 0.0, 1.0))
    other.bytes, other.pieces, other.chunks, other.descriptors = 10, 20, 30, 40
    whole = Tally()
    whole.merge(one)
    whole.merge(other)
    stats = whole.stats(route="staged", why="told", peers=("a", "b"), started=0.0, finished=6.0)
    assert (stats.bytes, stats.pieces, stats.chunks, stats.descriptors) == (11, 22, 33, 44)
    assert (stats.wire, stats.scattering, stats.gathering, stats.posting, stats.queued) == (4.0, 1.0, 0.0, 0.0, 0.0)
    assert stats.first_byte == 0.25
    assert (stats.route, stats.why, stats.peers, stats.duration) == ("staged", "told", ("a", "b"), 6.0)


def test_a_rank_without_a_byte_does_not_hide_the_first_of_another():
    whole, late = Tally(), Tally(first_byte=7.0)
    for part in (Tally(), late, Tally()):
        whole.merge(part)
    assert whole.first_byte == 7.0
