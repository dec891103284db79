"""What the model does next, step by step, played without a model."""

from hypothesis import given
from hypothesis import strategies as st

from examples.serving.scheduler import Generation, Said, Scheduler
from kvxfer.tools.demo.model import Sequence

STOP = 99


def asked(prompt=3, left=2, held=0):
    return Generation(Sequence([], held), list(range(prompt)), left, frozenset({STOP}))


def upcoming(scheduler):
    """The next step, which there is."""
    step = scheduler.step()
    assert step is not None
    return step


def play(scheduler, following=7):
    """One step; what each generation said."""
    step = upcoming(scheduler)
    said = [(each, scheduler.took(each, 1, following)) for each in step.batch]
    for each in step.batch:
        each.sequence.tokens += 1
    if step.prompt is not None:
        step.prompt.sequence.tokens += len(step.chunk)
        said.append((step.prompt, scheduler.took(step.prompt, len(step.chunk), following)))
    return [item for item in said if item[1] is not None]


def test_a_stop_token_ends_it():
    scheduler, one = Scheduler(batch=2, chunk=4), asked(left=5)
    scheduler.add(one)
    assert play(scheduler, STOP) == [(one, Said(STOP, "stop"))]
    assert one not in scheduler


def test_prompts_are_taken_in_order_and_dropped_anywhere():
    scheduler, many = Scheduler(batch=2, chunk=4), [asked() for _ in range(3)]
    for each in many:
        scheduler.add(each)
    assert upcoming(scheduler).prompt is many[0]
    scheduler.drop(many[0])
    scheduler.drop(many[0])
    play(scheduler)
    assert upcoming(scheduler).prompt is many[2]
    scheduler.drop(many[1])
    assert upcoming(scheduler).batch == []


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), max_size=12), st.integers(1, 4), st.integers(1, 6))
def test_everybody_says_as_much_as_was_asked_for_and_nobody_starves(requests, batch, chunk):
    scheduler = Scheduler(batch=batch, chunk=chunk)
    many = [asked(prompt, left) for prompt, left in requests]
    for each in many:
        scheduler.add(each)
    said = {id(each): [] for each in many}
    waited = dict.fromkeys(said, 0)
    while len(scheduler):
        step = upcoming(scheduler)
        running = step.batch
        assert (step, len(running) <= batch, len(step.chunk) <= chunk) == (scheduler.step(), True, True)
        for each in scheduler._running:
            waited[id(each)] = 0 if each in running else waited[id(each)] + 1
            assert waited[id(each)] <= len(many) // batch
        for each, item in play(scheduler):
            said[id(each)].append(item)
    for each, (prompt, left) in zip(many, requests, strict=True):
        assert [item.finish for item in said[id(each)]] == [None] * (left - 1) + ["length"]
        assert each.sequence.tokens == prompt + left - 1, "the last token is said, and not run"
