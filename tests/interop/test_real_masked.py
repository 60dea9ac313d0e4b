"""A trained masked language model of chemical reactions: `pip install --no-deps rxnmapper`, torch.

RXNMapper (Schwaller et al. 2021) is an ALBERT over SMILES. Its package holds a pickle, which torch
rewrites here as safetensors; genlab reads none.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import genlab
import pytest

PACKAGE, TORCH = (importlib.util.find_spec(name) for name in ("rxnmapper", "torch"))
ATOMS = r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$"
PATTERN = ATOMS + r"|%[0-9]{2}|[0-9]"
REACTIONS = (
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
)


def tokenizer_json(vocabulary):
    """Atoms and bonds are the words; a text stands between [CLS] and [SEP]."""
    vocab = {word: index for index, word in enumerate(vocabulary)}
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    added = [
        {
            "id": vocab[name], "content": name, "special": True, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False,
        }
        for name in names
    ]  # fmt: skip
    frame = {
        name: {"id": name, "ids": [vocab[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")
    }
    order = ({"SpecialToken": {"id": "[CLS]", "type_id": 0}},
             {"Sequence": {"id": "A", "type_id": 0}},
             {"SpecialToken": {"id": "[SEP]", "type_id": 0}})  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing", "single": list(order), "pair": [],
            "special_tokens": frame,
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }  # fmt: skip


if PACKAGE is not None and TORCH is not None:

    @pytest.fixture(scope="module")
    def rxnmapper(tmp_path_factory):
        import torch
        from genlab.train.interop.tensor_files import Spec, TensorWriter

        models = Path(PACKAGE.submodule_search_locations[0]) / "models" / "transformers"
        (source,) = models.iterdir()
        folder = tmp_path_factory.mktemp("rxnmapper")
        for name in ("config.json", "special_tokens_map.json"):
            shutil.copyfile(source / name, folder / name)
        words = (source / "vocab.txt").read_text().split("\n")
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json([w for w in words if w])))
        loaded = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
        arrays = {name: tensor.numpy() for name, tensor in loaded.items()}
        specs = {name: Spec(array.dtype, array.shape) for name, array in arrays.items()}
        with TensorWriter(folder / "model.safetensors", specs) as writer:
            for name, array in arrays.items():
                writer.write(name, array)
            writer.close({"format": "pt"})
        return genlab.load(folder)

    @pytest.mark.slow
    def test_masked_atoms_of_products_are_found(rxnmapper):
        """Each atom, bond or bracket of a product, hidden alone, is what the model expects."""
        assert rxnmapper.model.num_params() == 735_567  # the pooler not among them
        texts, hidden = [], []
        for reaction in REACTIONS:
            given, product = reaction.split(">>")
            tokenizer = rxnmapper.tokenizer
            words = [tokenizer.decode([index]) for index in tokenizer.encode(product)]
            assert "".join(words) == product
            for at, word in enumerate(words):
                blank = [*words[:at], "[MASK]", *words[at + 1 :]]
                texts.append(f"{given}>>{''.join(blank)}")
                hidden.append(word)
        filled = rxnmapper.fill(texts, temperature=0.0)
        right = [one.pieces == [word] for one, word in zip(filled, hidden, strict=True)]
        assert sum(right) >= 0.9 * len(right), f"{sum(right)} of {len(right)}"
        whole = [one.text in REACTIONS for one in filled]
        assert whole == right
