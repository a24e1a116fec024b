"""Load format "forebay" of vLLM: real model classes get the same bits as from vLLM's own loader.

vLLM runs on the CPU here. It is tested up to the end of `load_weights`. A model that needs none of vLLM's kernels is
reloaded, too.
"""

import shutil

import pytest
from ranks import read_once, run_ranks
from small_models import bytes_of, experts_in, models, quantised  # noqa: F401

WHY = "LOADER OF VLLM NOT CHECKED: vllm is not installed here"
pytest.importorskip("vllm", reason=WHY)

import torch  # noqa: E402


def other_source(folder):
    """Return a folder with weights of two formats, and with a table that vLLM keeps in host memory."""
    import forebay.torch

    folder.mkdir()
    tensors = {"a": torch.arange(9), "engram.embed.weight": torch.ones(30, 3)}
    forebay.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    torch.save({"b": torch.arange(5)}, folder / "old.bin")
    return folder


def test_one_rank(models, tmp_path):  # noqa: F811
    shutil.copytree(models["llama"], tmp_path / "old")
    for file in (tmp_path / "old").glob("*.safetensors*"):
        file.unlink()
    torch.save({"x": torch.zeros(3)}, tmp_path / "old" / "pytorch_model.bin")
    cases = {
        "llama": {"folder": str(models["llama"]), "reload": True},
        "small budget": {"folder": str(models["llama"]), "extra": {"budget": "1MiB"}},
        "qwen2_tied": {"folder": str(models["qwen2_tied"]), "extra": {"budget": "64MiB"}},
        "mixtral": {"folder": str(models["mixtral"])},
        "qwen3_moe": {"folder": str(models["qwen3_moe"])},
        "pipeline": {"folder": str(models["llama"]), "missing_layers": [0, 2]},
    }
    llama = str(models["llama"])
    errors = {
        "unknown option": {"folder": llama, "extra": {"threads": 8}},
        "wrong budget": {"folder": llama, "extra": {"budget": "lots"}},
        "strategy": {"folder": llama, "options": {"safetensors_load_strategy": "eager"}},
        "no safetensors": {"folder": str(tmp_path / "old")},
    }
    for kind in ("fp8", "gptq", "compressed"):
        cases[kind] = {"folder": quantised(models["llama"], tmp_path / kind, kind)}
    sources = [llama, str(other_source(tmp_path / "other"))]
    (found,) = run_ranks("rank_vllm.py", 1, {"cases": cases, "errors": errors, "sources": sources})
    for name in cases:
        assert found[name]["loader"] == "ForebayModelLoader"
        assert found[name]["equal"] > 10
    assert found["llama"]["class"] == "LlamaForCausalLM"
    assert found["mixtral"]["class"] == "MixtralForCausalLM"
    assert found["llama"]["reloaded"] == found["llama"]["equal"] and found["llama"]["in_place"]
    everything = bytes_of(models["llama"])
    assert {name for name, *_ in found["pipeline"]["read"]} == {
        name for name in everything if not name.startswith(("model.layers.0.", "model.layers.2."))
    }
    assert found["command line"] == "forebay"
    names = found["sources"]["names"]
    assert {"other.a", "other.engram.embed.weight", "old.b", "lm_head.weight"} <= set(names)
    assert found["sources"]["left_out"] == sorted(name for name in everything if "mlp" in name), "the model uses none"
    assert "engram.embed.weight" not in {name for name, *_ in found["sources"]["read"]}, "it is mapped"
    assert "has the option 'threads'" in found["unknown option"]["error"]
    assert "'lots' is no size" in found["wrong budget"]["error"]
    assert "safetensors_load_strategy 'eager' has no effect" in found["strategy"]["error"]
    assert "has no safetensors files" in found["no safetensors"]["error"]


def test_two_ranks(models, tmp_path):  # noqa: F811
    experts = {"enable_expert_parallel": True, "enable_ep_weight_filter": True}
    round_robin = {**experts, "expert_placement_strategy": "round_robin"}
    cases = {
        "llama": {"folder": str(models["llama"]), "extra": {"budget": "1MiB"}},
        "qwen2_tied": {"folder": str(models["qwen2_tied"])},
        "mixtral": {"folder": str(models["mixtral"])},
        "each for itself": {"folder": str(models["llama"]), "extra": {"share": False}},
        "experts": {"folder": str(models["mixtral"]), "options": experts},
        "experts in turn": {"folder": str(models["qwen3_moe"]), "options": round_robin},
    }
    for kind in ("fp8", "gptq", "compressed"):
        cases[kind] = {"folder": quantised(models["llama"], tmp_path / kind, kind)}
    found = run_ranks("rank_vllm.py", 2, {"cases": cases})
    for name, case in cases.items():
        times = 2 if name == "each for itself" else 1
        reads = read_once(found, name, bytes_of(case["folder"]), times)
        if name in ("llama", "qwen2_tied"):
            assert all(sum(nbytes for *_, nbytes in result[name]["read"]) > 0 for result in found)
        if "experts" in name:
            is_local = [lambda it: it < 4, lambda it: it >= 4]
            if name == "experts in turn":
                is_local = [lambda it: it % 2 == 0, lambda it: it % 2 == 1]
            for rank in (0, 1):
                wanted = {it for it in range(8) if is_local[rank](it)}
                assert experts_in(tensor for tensor, _ in reads[rank]) == wanted, "other experts are never read"


def test_entry_point():
    from importlib.metadata import entry_points

    (found,) = [it for it in entry_points(group="vllm.general_plugins") if it.name == "forebay"]
    assert found.value == "forebay.vllm:register"
