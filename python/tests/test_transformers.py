"""Models of transformers get the same bits from forebay as from transformers itself."""

import json
import threading

import forebay
import pytest

WHY = "MODELS OF TRANSFORMERS NOT CHECKED: transformers 5, accelerate or torch are not installed here"
transformers = pytest.importorskip("transformers", reason=WHY, minversion="5.19")
torch = pytest.importorskip("torch", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

import forebay.torch  # noqa: E402
import forebay.transformers  # noqa: E402
from forebay import _ordered  # noqa: E402

SIZES = {"num_attention_heads": 4, "vocab_size": 512, "intermediate_size": 128, "hidden_size": 64}
DECODER = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 128}
MODELS = {
    "llama": ("AutoModelForCausalLM", "LlamaConfig", DECODER),
    "qwen2_tied": ("AutoModelForCausalLM", "Qwen2Config", {**DECODER, "tie_word_embeddings": True}),
    "gpt2_tied": (
        "AutoModelForCausalLM",
        "GPT2Config",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 512,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mixtral_merged_experts": ("AutoModelForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "qwen3_moe_merged_experts": (
        "AutoModelForCausalLM",
        "Qwen3MoeConfig",
        {**DECODER, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    ),
    "gpt_oss": ("AutoModelForCausalLM", "GptOssConfig", {**DECODER, "head_dim": 16, "num_local_experts": 4}),
    "bert": ("AutoModelForMaskedLM", "BertConfig", {**SIZES, "num_hidden_layers": 2}),
    "t5": (
        "AutoModelForSeq2SeqLM",
        "T5Config",
        {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 512},
    ),
    "vit": (
        "AutoModelForImageClassification",
        "ViTConfig",
        {**SIZES, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8},
    ),
}


def made(name, folder, **options):
    auto, config, sizes = MODELS[name]
    sizes = {key: value for key, value in sizes.items() if name != "vit" or key != "vocab_size"}
    torch.manual_seed(3)
    kind = getattr(transformers, auto)
    model = kind.from_config(getattr(transformers, config)(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder, **{"max_shard_size": "100KB", **options})
    return kind


def assert_equal(ours, theirs):
    """Check types, bits, tied weights, and buffers that no file has."""
    assert type(ours) is type(theirs)
    one, other = ours.state_dict(), theirs.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.device) == (other[name].dtype, other[name].device), name
        assert torch.equal(tensor, other[name]), name
    for (name, tensor), (wanted, buffer) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert name == wanted and torch.equal(tensor, buffer), name
    places = [[tensor.data_ptr() for tensor in state.values()] for state in (one, other)]
    assert [places[0].index(it) for it in places[0]] == [places[1].index(it) for it in places[1]], "tied weights"


@pytest.fixture
def read_alone(monkeypatch):
    """Names of tensors that were not read ahead."""
    names = []

    class Native:
        def __getattr__(self, name):
            return getattr(forebay._native, name)

        @staticmethod
        def load(table, wanted, *rest):
            names.extend(wanted)
            return forebay._native.load(table, wanted, *rest)

    monkeypatch.setattr(_ordered, "_native", Native())
    return names


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path, read_alone):
    kind = made(name, tmp_path)
    for options in ({}, {"dtype": torch.float32}, {"device_map": "cpu", "dtype": "auto"}, {"device_map": "auto"}):
        theirs = kind.from_pretrained(tmp_path, **options)
        assert_equal(forebay.transformers.from_pretrained(tmp_path, budget="2MiB", **options), theirs)
        assert_equal(forebay.transformers.from_pretrained(tmp_path, model_class=kind, **options), theirs)
    assert read_alone == []


def test_one_thread(tmp_path, read_alone, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    kind = made("mixtral_merged_experts", tmp_path)
    assert_equal(forebay.transformers.from_pretrained(tmp_path), kind.from_pretrained(tmp_path))
    assert read_alone == []


def test_device_map_with_layers_on_disk(tmp_path):
    kind = made("llama", tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.layers.2": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    found = []
    for number, load in enumerate((forebay.transformers.from_pretrained, kind.from_pretrained)):
        folder = tmp_path / f"offload{number}"
        model = load(tmp_path / "model", device_map=device_map, offload_folder=folder)
        assert model.hf_device_map == device_map
        with torch.no_grad():
            found.append(model(torch.arange(9)[None]).logits)
    assert torch.equal(*found)


def test_quantised_checkpoint(tmp_path):
    """Blocks of FP8 that transformers' own quantiser makes BF16 of."""
    kind = made("llama", tmp_path, max_shard_size="1GB")
    tensors = forebay.load(tmp_path, framework="pt")
    changed = {}
    for name, tensor in tensors.items():
        if "layers" in name and "proj" in name:
            changed[name] = tensor.to(torch.float8_e4m3fn)
            changed[name + "_scale_inv"] = torch.rand(tensor.shape[0] // 32, tensor.shape[1] // 32)
        else:
            changed[name] = tensor
    forebay.torch.save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32], "dequantize": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = kind.from_pretrained(tmp_path)
    assert theirs.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert_equal(forebay.transformers.from_pretrained(tmp_path), theirs)


def test_tensors_that_no_model_has_are_not_read(tmp_path, monkeypatch):
    kind = made("llama", tmp_path, max_shard_size="1GB")
    tensors = forebay.load(tmp_path, framework="pt")
    tensors["model.layers.3.mtp.weight"] = torch.ones(500, 500)
    forebay.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    planned = []
    plan = _ordered.Tensors.plan
    monkeypatch.setattr(_ordered.Tensors, "plan", lambda self, wanted: (planned.extend(wanted), plan(self, wanted))[1])
    model, info = forebay.transformers.from_pretrained(tmp_path, output_loading_info=True)
    assert_equal(model, kind.from_pretrained(tmp_path))
    assert info["unexpected_keys"] == {"model.layers.3.mtp.weight"}
    names = [name for name, _ in planned]
    assert len(names) == len(tensors) - 1 and "model.layers.3.mtp.weight" not in names


def test_missing_weights_are_initialised(tmp_path):
    kind = made("llama", tmp_path, max_shard_size="1GB")
    tensors = forebay.load(tmp_path, framework="pt")
    del tensors["lm_head.weight"], tensors["model.norm.weight"]
    forebay.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = []
    for load in (forebay.transformers.from_pretrained, kind.from_pretrained):
        torch.manual_seed(9)
        found.append(load(tmp_path))
    assert_equal(*found)


def test_loads_of_other_code(tmp_path):
    kind = made("llama", tmp_path)
    with forebay.transformers.reading(budget="8MiB") as state:
        ours = kind.from_pretrained(tmp_path)
        assert state.loads == 1
        thread = threading.Thread(target=kind.from_pretrained, args=(tmp_path,))
        thread.start()
        thread.join()
        assert state.loads == 1, "other threads go on as before"
    theirs = kind.from_pretrained(tmp_path)
    assert state.loads == 1
    assert_equal(ours, theirs)


def test_errors(tmp_path):
    made("llama", tmp_path / "good")
    with pytest.raises(forebay.OptionError, match="no size"):
        forebay.transformers.from_pretrained(tmp_path / "good", budget="lots")
    with pytest.raises(forebay.OptionError, match="1MiB"):
        forebay.transformers.from_pretrained(tmp_path / "good", budget=3)
    with pytest.raises(forebay.OptionError, match="gguf_file"):
        forebay.transformers.from_pretrained(tmp_path / "good", gguf_file="x.gguf")
    made("llama", tmp_path / "bad")
    damaged = sorted((tmp_path / "bad").glob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(forebay.FormatError, match=damaged.name):
        forebay.transformers.from_pretrained(tmp_path / "bad")
    made("llama", tmp_path / "old")
    for file in (tmp_path / "old").glob("*.safetensors*"):
        file.unlink()
    torch.save({}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        forebay.transformers.from_pretrained(tmp_path / "old")


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    made("llama", tmp_path)
    plan = _ordered.Tensors.plan

    def shrunk(self, wanted):
        for file in self.files:
            with open(file, "r+b") as it:
                it.truncate(1000)
        plan(self, wanted)

    monkeypatch.setattr(_ordered.Tensors, "plan", shrunk)
    with pytest.raises(forebay.ReadError, match="safetensors"):
        forebay.transformers.from_pretrained(tmp_path)


def test_tensors_in_another_order(tmp_path, read_alone):
    """Tensors come in the order of the plan, others are read alone, and several threads may take them."""
    tensors = {f"t{number}": torch.full((number + 1, 1000), number, dtype=torch.int32) for number in range(60)}
    forebay.torch.save_file(tensors, tmp_path / "x.safetensors")
    names = sorted(tensors)
    with _ordered.Tensors([tmp_path / "x.safetensors"], "1MiB") as found:
        found.plan([(name, "cpu") for name in names[:50]])
        taken = {}

        def take(start):
            for name in names[start:50:4]:
                taken[name] = found.take(name)

        threads = [threading.Thread(target=take, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_alone == []
        for name in [*names[50:], "t7"]:
            taken[name] = found.take(name)
        assert read_alone == [*names[50:], "t7"]
    assert all(torch.equal(taken[name], tensor) for name, tensor in tensors.items())
