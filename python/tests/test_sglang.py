"""Load format "forebay" of SGLang: real model classes get the same bits as from SGLang's own loader.

SGLang runs on the CPU here, with stand-ins for its kernels if they cannot be imported. It is tested up to the end of
`load_weights`.
"""

import shutil

import pytest
from ranks import read_once, run_ranks
from small_models import bytes_of, experts_in, models, quantised  # noqa: F401

pytest.importorskip("sglang", reason="LOADER OF SGLANG NOT CHECKED: sglang is not installed here")

import forebay.torch
import torch


def test_one_rank(models, tmp_path):  # noqa: F811
    shutil.copytree(models["llama"], tmp_path / "old")
    for file in (tmp_path / "old").glob("*.safetensors*"):
        file.unlink()
    torch.save({"x": torch.zeros(3)}, tmp_path / "old" / "pytorch_model.bin")
    shutil.copytree(tmp_path / "old", tmp_path / "mistral")
    forebay.torch.save_file({"x": torch.zeros(3)}, tmp_path / "mistral" / "consolidated.safetensors")
    llama = str(models["llama"])
    cases = {
        "llama": {"folder": llama, "update": True},
        "small budget": {"folder": llama, "extra": {"budget": "1MiB"}},
        "qwen2_tied": {"folder": str(models["qwen2_tied"]), "extra": {"budget": "64MiB"}},
        "mixtral": {"folder": str(models["mixtral"])},
        "qwen3_moe": {"folder": str(models["qwen3_moe"])},
    }
    (tmp_path / "draft").mkdir()
    names = ["model.mtp.layers.0.a", "model.mtp.layers.1.a", "model.embed.b"]
    tensors = {name: torch.full((5,), number) for number, name in enumerate(names)}
    forebay.torch.save_file(tensors, tmp_path / "draft" / "model.safetensors", {"format": "pt"})
    cases["pipeline"] = {"folder": llama, "missing_layers": [0, 2]}
    cases["draft"] = {"folder": llama, "draft": 1, "weights": str(tmp_path / "draft")}
    # SGLang asks a GPU for other quantisations.
    for kind in ("fp8", "gptq"):
        cases[kind] = {"folder": quantised(models["llama"], tmp_path / kind, kind)}
    errors = {
        "unknown option": {"folder": llama, "extra": {"num_threads": 8}},
        "other loader": {"folder": llama, "quantization": "modelopt_fp8"},
        "prefetch": {"folder": llama, "options": {"weight_loader_prefetch_checkpoints": True}},
        "mistral": {"folder": str(tmp_path / "mistral")},
        "no safetensors": {"folder": str(tmp_path / "old")},
    }
    (found,) = run_ranks("rank_sglang.py", 1, {"cases": cases, "errors": errors})
    for name, case in cases.items():
        assert found[name]["loader"][:2] == ["ForebayDefaultModelLoader", "DefaultModelLoader"]
        assert found[name]["equal"] > 10
        if not {"update", "missing_layers", "draft"} & case.keys():
            assert sum(it[2] for it in found[name]["read"]) == sum(bytes_of(case["folder"]).values())
    everything = set(bytes_of(models["llama"]))
    missing = ("model.layers.0.", "model.layers.2.")
    assert {name for name, *_ in found["pipeline"]["read"]} == {it for it in everything if not it.startswith(missing)}
    assert found["draft"]["draft"] == [
        ["model.embed.b", "model.mtp.layers.0.a"],
        ["model.embed.b", "model.mtp.layers.1.a"],
    ]
    assert found["llama"]["class"] == "LlamaForCausalLM" and found["llama"]["updated"] == found["llama"]["equal"]
    assert found["mixtral"]["class"] == "MixtralForCausalLM"
    assert found["server_args"] == "forebay"
    assert "has the option 'num_threads'" in found["unknown option"]["error"]
    assert "by its ModelOptModelLoader" in found["other loader"]["error"]
    assert "--weight-loader-prefetch-checkpoints has no effect" in found["prefetch"]["error"]
    assert "Mistral's own format" in found["mistral"]["error"]
    assert "has no safetensors files" in found["no safetensors"]["error"]


def test_two_ranks(models):  # noqa: F811
    cases = {
        "llama": {"folder": str(models["llama"]), "extra": {"budget": "1MiB"}},
        "mixtral": {"folder": str(models["mixtral"])},
        "each for itself": {"folder": str(models["llama"]), "extra": {"share": False}},
        "experts": {"folder": str(models["mixtral"]), "options": {"ep_size": 2}},
        "experts of qwen": {"folder": str(models["qwen3_moe"]), "options": {"ep_size": 2}},
    }
    found = run_ranks("rank_sglang.py", 2, {"cases": cases})
    for name, case in cases.items():
        times = 2 if name == "each for itself" else 1
        reads = read_once(found, name, bytes_of(case["folder"]), times)
        if "experts" in name:
            experts = [experts_in(tensor for tensor, _ in reads[rank]) for rank in (0, 1)]
            assert experts == [{0, 1, 2, 3}, {4, 5, 6, 7}], "other experts are never read"


def test_entry_point():
    from importlib.metadata import entry_points

    (found,) = [it for it in entry_points(group="sglang.srt.plugins") if it.name == "forebay"]
    assert found.value == "forebay.sglang:register"
