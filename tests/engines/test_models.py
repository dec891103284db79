"""A model whose caches cannot be handed over is refused by name when its engine starts, before anything is offered."""

import pytest
from pd import EngineError, connected

GUESSING = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}')

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        # vLLM's kernel for it is in no list of those that store vectors where the view has them
        ("latent", (), r"the cache of model\.layers\.0\.\S+ is written by attention backend (CPU|AMX)_MLA"),
        ("short-conv", GUESSING, r"the cache of model\.layers\.0\.\S+ is a MambaSpec with num_speculative_blocks=2"),
    ],
    ids=["latent", "state of guesses"],
)
def test_a_model_is_refused_by_name(name, args, reason, start, model, tmp_path):
    with pytest.raises(EngineError, match=rf"GeometryError: {reason}"):
        start(connected("prefill", model(name), tmp_path, "--dtype", "float32", *args))
