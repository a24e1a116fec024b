"""Small models with random weights, for tests of loaders of engines."""

import re

import forebay
import pytest

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of small models with random weights, in several files each."""
    import torch

    transformers = pytest.importorskip("transformers", reason="LOADERS OF ENGINES NOT CHECKED: transformers is missing")
    configs = {
        "llama": transformers.LlamaConfig(**SMALL),
        "qwen2_tied": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
        "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
        ),
    }
    folders = {}
    for name, config in configs.items():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name], max_shard_size="100KB")
        assert len(list(folders[name].glob("*.safetensors"))) > 1
    return folders


def bytes_of(folder):
    """Return the bytes of each tensor of a folder, by name."""
    return {name: it.nbytes for name, it in forebay.list_tensors(folder).items()}


def experts_in(names):
    """Return the numbers of the experts that some tensors belong to."""
    found = (re.search(r"\.experts\.(\d+)\.", name) for name in names)
    return {int(it[1]) for it in found if it}
