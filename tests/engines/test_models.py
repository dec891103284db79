"""A model whose caches cannot be handed over is refused by name when its engine starts, before anything is offered."""

import pytest
from pd import EngineError, connected

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        # vLLM's kernel for it is in no list of those that store vectors where the view has them
        ("latent", r"the cache of model\.layers\.0\.\S+ is written by attention backend (CPU|AMX)_MLA"),
        ("recurrent", r"the cache of backbone\.layers\.0\.mixer is a MambaSpec"),
    ],
    ids=["latent", "recurrent"],
)
def test_a_model_is_refused_by_name(name, reason, start, model, tmp_path):
    with pytest.raises(EngineError, match=rf"GeometryError: {reason}"):
        start(connected("prefill", model(name), tmp_path, "--dtype", "float32"))
