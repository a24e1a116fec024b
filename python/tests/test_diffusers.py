"""Models and pipelines of diffusers get the same bits from forebay as from diffusers itself."""

import forebay
import pytest

WHY = "MODELS OF DIFFUSERS NOT CHECKED: diffusers is not installed here"
diffusers = pytest.importorskip("diffusers", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY, minversion="5.19")
torch = pytest.importorskip("torch", reason=WHY)

import forebay.diffusers  # noqa: E402


def unet():
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )


def vae():
    return diffusers.AutoencoderKL(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
    )


def assert_equal(ours, theirs):
    assert type(ours) is type(theirs)
    one, other = ours.state_dict(), theirs.state_dict()
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("make", [unet, vae])
@pytest.mark.parametrize("shard", ["1GB", "600KB"])
def test_models(make, shard, tmp_path):
    torch.manual_seed(1)
    model = make()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "600KB")
    for options in ({}, {"torch_dtype": torch.bfloat16}, {"device_map": "cpu"}, {"low_cpu_mem_usage": False}):
        theirs = type(model).from_pretrained(tmp_path, **options)
        assert_equal(forebay.diffusers.from_pretrained(tmp_path, budget="4MiB", **options), theirs)
    assert_equal(forebay.diffusers.from_pretrained(tmp_path, model_class=type(model)), model)


def test_old_names(tmp_path):
    """Names of attention layers as of early versions, which diffusers changes before it loads."""
    import forebay.torch

    model = vae()
    model.save_pretrained(tmp_path)
    tensors = forebay.load(tmp_path / "diffusion_pytorch_model.safetensors", framework="pt")
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    changed = {}
    for name, tensor in tensors.items():
        for new, before in old.items():
            name = name.replace(f".{new}.", f".{before}.")
        changed[name] = tensor
    assert changed.keys() != tensors.keys()
    forebay.torch.save_file(changed, tmp_path / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    assert_equal(forebay.diffusers.from_pretrained(tmp_path), type(model).from_pretrained(tmp_path))


def test_pipelines(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes, vocab_size=100, projection_dim=32))
    scheduler = diffusers.DDIMScheduler()
    parts = {"unet": unet(), "vae": vae(), "text_encoder": text, "scheduler": scheduler, "tokenizer": None}
    parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    diffusers.StableDiffusionPipeline(**parts).save_pretrained(tmp_path)
    with forebay.diffusers.reading() as state:
        found = diffusers.DiffusionPipeline.from_pretrained(tmp_path, tokenizer=None)
        assert state.loads == 3, "the models of diffusers and transformers"
    ours = forebay.diffusers.from_pretrained(tmp_path, tokenizer=None)
    for it in (ours, found):
        assert type(it) is diffusers.StableDiffusionPipeline
        for name in ("unet", "vae", "text_encoder"):
            assert_equal(getattr(it, name), parts[name])
    assert_equal(forebay.diffusers.from_pretrained(tmp_path, subfolder="vae"), parts["vae"])


def test_errors(tmp_path):
    vae().save_pretrained(tmp_path / "old", safe_serialization=False)
    with pytest.raises(OSError, match="safetensors"):
        forebay.diffusers.from_pretrained(tmp_path / "old")
    with pytest.raises(forebay.OptionError, match="use_safetensors"):
        forebay.diffusers.from_pretrained(tmp_path / "old", use_safetensors=False)
    vae().save_pretrained(tmp_path / "bad")
    file = tmp_path / "bad" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(forebay.FormatError, match=file.name):
        forebay.diffusers.from_pretrained(tmp_path / "bad")
