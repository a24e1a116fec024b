"""Small models with random weights, for tests of loaders of engines."""

import json
import re
import shutil

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


GROUP = 32

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISATIONS = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**INT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**INT8, "strategy": "token", "dynamic": True},
            }
        },
    },
}


def quantised(plain, folder, kind):
    """Write a checkpoint with the names, types and shapes of a quantisation, and with random weights."""
    import forebay.torch
    import torch

    generator = torch.Generator().manual_seed(11)

    def integers(*shape):
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)

    def scales(*shape):
        return torch.rand(*shape, generator=generator)

    tensors = {}
    for name, tensor in forebay.load(plain, framework="pt").items():
        module = name.removesuffix("weight")
        if "proj" not in name:
            tensors[name] = tensor
        elif kind == "fp8":
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[module + "weight_scale"] = scales(())
        elif kind == "compressed":
            tensors[name] = (tensor * 100).to(torch.int8)
            tensors[module + "weight_scale"] = scales(tensor.shape[0], 1)
        else:
            rows, columns = tensor.shape
            tensors[module + "qweight"] = integers(columns // 8, rows)
            tensors[module + "qzeros"] = integers(columns // GROUP, rows // 8)
            tensors[module + "scales"] = scales(columns // GROUP, rows).half()
            tensors[module + "g_idx"] = (torch.arange(columns) // GROUP).int()
    folder.mkdir()
    for file in plain.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, folder)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = QUANTISATIONS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    forebay.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def bytes_of(folder):
    """Return the bytes of each tensor of a folder, by name."""
    return {name: it.nbytes for name, it in forebay.list_tensors(folder).items()}


def experts_in(names):
    """Return the numbers of the experts that some tensors belong to."""
    found = (re.search(r"\.experts\.(\d+)\.", name) for name in names)
    return {int(it[1]) for it in found if it}
