"""Modules of PyTorch whose weights are in files, change, or are of other libraries. Without PyTorch, nothing here is checked."""

import copy
import gc
import os
import subprocess
import warnings

import forebay
import pytest

try:
    import torch
except ImportError:
    torch = None
    warnings.warn("SOURCES OF MODULES NOT CHECKED: torch is not installed here", stacklevel=1)

pytestmark = pytest.mark.skipif(torch is None, reason="SOURCES OF MODULES NOT CHECKED: torch is not installed here")

if torch is not None:
    import forebay.torch
    from torch import nn

    from test_modules import DEVICES, Language, made, resident, sizes

    class Wide(nn.Module):
        """Blocks with weights of 2 MiB and more, so that they are not held in RAM as small ones are."""

        def __init__(self, size=1024, blocks=6):
            super().__init__()
            self.embed = nn.Embedding(1500, size)
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size)) for _ in range(blocks))
            self.register_buffer("scale", torch.ones(size))

        def forward(self, ids):
            x = self.embed(ids) * self.scale
            for block in self.blocks:
                x = x + torch.nn.functional.gelu(block(x))
            return x @ self.embed.weight.t()
else:
    DEVICES = ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A module in BF16, its input, and a folder with its weights in a safetensors file."""
    torch.manual_seed(3)
    module = Wide().to(torch.bfloat16).eval()
    module.scale.uniform_(0.5, 2)
    folder = tmp_path_factory.mktemp("wide")
    forebay.torch.save_file(module.state_dict(), folder / "model.safetensors")
    return module, torch.randint(1500, (2, 9)), folder


def on_meta(dtype=None):
    with torch.device("meta"):
        return Wide().to(dtype or torch.bfloat16).eval()


MIB = 1 << 20


@pytest.mark.parametrize("ram", [None, "9MiB", "14MiB"])
def test_weights_of_files_equal_those_in_memory(wide, ram, device):
    module, given, folder = wide
    expected = resident(module, device)(given.to(device))
    for source in (folder, folder / "model.safetensors", [folder / "model.safetensors"]):
        streamed = on_meta()
        with forebay.torch.stream(streamed, device, "6MiB", ram=ram, source=source) as stream, torch.no_grad():
            for _ in range(4):
                assert torch.equal(streamed(given.to(device)), expected)
            counts = stream.statistics()
            assert counts.ram_bytes + counts.buffer_bytes <= (100 if ram is None else int(ram[:-3])) * MIB
            assert counts.read_bytes >= counts.file_bytes > 10 * MIB
            for name, tensor in streamed.state_dict().items():
                assert torch.equal(tensor.cpu(), module.state_dict()[name]), name
        assert torch.equal(streamed(given), module(given)), "after the end"
        assert all(type(it) is nn.Parameter and it.device.type == "cpu" for it in streamed.parameters())


def test_what_ram_has_no_room_for_is_read_in_each_pass(wide, device):
    module, given, folder = wide
    reads = {}
    for ram in ("9MiB", None):
        streamed = on_meta()
        with forebay.torch.stream(streamed, device, "6MiB", ram=ram, source=folder) as stream, torch.no_grad():
            for _ in range(3):
                streamed(given.to(device))
            before = stream.statistics().read_bytes
            for _ in range(4):
                streamed(given.to(device))
            reads[ram] = stream.statistics().read_bytes - before
    assert reads[None] == 0 and reads["9MiB"] > 4 * 8 * MIB, reads


def small_language_model(folder):
    """Save a model of transformers, and return it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=3000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("codec", ["auto", "none", "compact", "exponents", "zstd", "gdeflate"])
def test_packs_are_sources(tmp_path, device, codec):
    program = os.environ.get("FOREBAY_PROGRAM")
    if program is None:
        pytest.skip("PACKS AS SOURCES NOT CHECKED: FOREBAY_PROGRAM names no forebay")
    model = small_language_model(tmp_path / "model")
    subprocess.run([program, "pack", tmp_path / "model", "-o", tmp_path / "pack", "--codec", codec], check=True, capture_output=True)
    ids = torch.randint(3000, (1, 12), device=device)
    rotary = copy.deepcopy(model.model.rotary_emb)
    with torch.no_grad():
        expected = model.to(device)(ids).logits
        for ram in ("12MiB", None):
            with torch.device("meta"):
                streamed = type(model)(model.config).to(torch.bfloat16).eval()
            # Packs have weights alone.
            streamed.model.rotary_emb = copy.deepcopy(rotary)
            with forebay.torch.stream(streamed, device, "6MiB", ram=ram, source=tmp_path / "pack") as stream:
                for _ in range(3):
                    assert torch.equal(streamed(ids).logits, expected)
                assert stream.statistics().read_bytes > 0
                for name, tensor in streamed.state_dict().items():
                    assert torch.equal(tensor.cpu(), model.state_dict()[name].cpu()), name


def test_sources_that_do_not_fit_are_refused_in_words(wide, tmp_path):
    module, given, folder = wide
    stream = forebay.torch.stream
    with pytest.raises(forebay.OptionError, match="float32.*bfloat16"):
        stream(on_meta(torch.float32), "cpu", "6MiB", source=folder)
    with torch.device("meta"):
        other = Wide(blocks=7).to(torch.bfloat16).eval()
    with pytest.raises(forebay.OptionError, match="2 weights are not in the source|4 weights are not in the source"):
        stream(other, "cpu", "6MiB", source=folder)
    without = on_meta()
    without.register_buffer("late", torch.ones(2, device="meta"))
    with pytest.raises(forebay.OptionError, match="buffer late"):
        stream(without, "cpu", "6MiB", source=folder)
    with pytest.raises(forebay.OptionError, match="sources"):
        stream([on_meta(), on_meta()], "cpu", "6MiB", source=[folder])
    with pytest.raises(forebay.OutOfMemoryError, match="bytes of RAM are needed"):
        stream(on_meta(), "cpu", "6MiB", ram="1MiB", source=folder)
    with pytest.raises(FileNotFoundError):
        stream(on_meta(), "cpu", "6MiB", source=folder / "absent")
    (tmp_path / "bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(forebay.OptionError, match="not in the source"):
        stream(on_meta(), "cpu", "6MiB", source=tmp_path)
    # A module in RAM that is refused keeps its weights.
    copied = Wide().to(torch.bfloat16).eval()
    copied.load_state_dict(module.state_dict())
    with pytest.raises(forebay.OutOfMemoryError):
        stream(copied, "cpu", "6MiB", ram="1MiB")
    assert torch.equal(copied(given), module(given))


def test_files_that_shrink_are_errors_and_nothing_is_wrong(wide, device, tmp_path):
    module, given, folder = wide
    expected = resident(module, device)(given.to(device))
    file = tmp_path / "model.safetensors"
    data = (folder / "model.safetensors").read_bytes()
    file.write_bytes(data)
    streamed = on_meta()
    with forebay.torch.stream(streamed, device, "6MiB", ram="9MiB", source=tmp_path), torch.no_grad():
        assert torch.equal(streamed(given.to(device)), expected)
        os.truncate(file, 4096)
        with pytest.raises(forebay.ReadError, match="model.safetensors"):
            for _ in range(3):
                streamed(given.to(device))
        with open(file, "r+b") as again:
            again.write(data)
        for _ in range(3):
            assert torch.equal(streamed(given.to(device)), expected)


def test_plans_tell_what_limits_a_pass(wide, device):
    _, given, folder = wide
    streamed = on_meta()
    with forebay.torch.stream(streamed, device, "6MiB", ram="9MiB", source=folder) as stream, torch.no_grad():
        assert stream.plan() == []
        for _ in range(4):
            streamed(given.to(device))
        [plan] = stream.plan()
        assert plan.call == "Wide.forward" and plan.limit in ("compute", "bus", "disk")
        parts = [plan.compute_seconds, plan.load_seconds, plan.read_seconds]
        assert min(parts) > 0 and plan.seconds >= max(parts) * 0.999
        # Then everything stays, or is in RAM.
        assert plan.seconds_with_more_vram == pytest.approx(plan.compute_seconds)
        assert plan.seconds_with_more_ram <= plan.seconds
    with pytest.raises(forebay.Error, match="closed"):
        stream.plan()


def test_several_modules_have_sources_of_their_own(wide, device):
    module, given, folder = wide
    ordinary, more = made("recurrent", torch.float32)
    expected = resident(module, device)(given.to(device)), resident(ordinary, device)(more.to(device))
    first = on_meta()
    with forebay.torch.stream([first, ordinary], device, "6MiB", ram="12MiB", source=[folder, None]), torch.no_grad():
        for _ in range(3):
            assert torch.equal(first(given.to(device)), expected[0])
            assert torch.equal(ordinary(more.to(device)), expected[1])


@pytest.mark.parametrize("guard", ["no_grad", "inference_mode"])
def test_changed_weights_are_used_from_then_on(device, guard):
    module, given = made("language", torch.bfloat16)
    other, given = Language().to(torch.bfloat16).eval(), given.to(device)
    before, after = resident(module, device)(given), resident(other, device)(given)
    with getattr(torch, guard)(), forebay.torch.stream(module, device, sizes(module)[0]):
        for _ in range(2):
            assert torch.equal(module(given), before)
        assert module.head.weight.mul_(1) is module.head.weight
        assert torch.equal(module(given), before)
        module.load_state_dict(other.state_dict())
        for _ in range(3):
            assert torch.equal(module(given), after)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_weights_that_a_module_changes_itself_stay_changed(device):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.count, self.other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.count.add_(1)
            return x + self.count[0] * self.other.sum()

    module = nn.Sequential(*(Counts() for _ in range(5))).eval()
    given = torch.zeros(2, device=device)
    with torch.no_grad(), forebay.torch.stream(module, device, 1024):
        for run in range(1, 5):
            assert torch.equal(module(given), torch.full((2,), 15.0 * run, device=device))
    assert all(torch.equal(it.count, torch.full((4,), 4.0)) for it in module)


def test_parameters_of_other_classes_come_as_they_are(device):
    class Quantised(nn.Parameter):
        def __new__(cls, data, quant_type=None):
            self = torch.Tensor._make_subclass(cls, data, False)
            self.quant_type = quant_type
            return self

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Quantised(torch.randint(256, (40, 18), dtype=torch.uint8), quant_type="Q4_0")

        def forward(self, x):
            assert type(self.weight) is Quantised and self.weight.quant_type == "Q4_0"
            return x + self.weight.to(x.dtype).sum(1)

    module = nn.Sequential(*(Layer() for _ in range(4))).eval()
    given = torch.rand(40, device=device)
    expected = given
    for layer in module:
        expected = expected + layer.weight.detach().as_subclass(torch.Tensor).to(device).to(given.dtype).sum(1)
    with torch.no_grad(), forebay.torch.stream(module, device, 2048):
        for _ in range(3):
            assert torch.equal(module(given), expected)
        assert module[0].weight.quant_type == "Q4_0"
    assert all(type(it.weight) is Quantised and it.weight.quant_type == "Q4_0" for it in module)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantised_layers_of_diffusers_stay_quantised(device, kind):
    diffusers, gguf = pytest.importorskip("diffusers"), pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = gguf.GGMLQuantizationType[kind]

    def layer():
        # In float32, whose products do not depend on where they are computed.
        new = GGUFLinear(256, 128, bias=False, compute_dtype=torch.float32)
        bytes = gguf.quants.quantize(torch.randn(128, 256).numpy(), kind)
        new.weight = GGUFParameter(torch.from_numpy(bytes.copy()), quant_type=kind)
        return new

    def build():
        torch.manual_seed(2)
        return nn.Sequential(*(nn.Sequential(layer(), nn.Linear(128, 256)) for _ in range(6))).eval()

    module, given = build(), torch.randn(3, 256, device=device)
    weights = [block[0].weight.detach().as_subclass(torch.Tensor).clone() for block in module]
    with torch.no_grad():
        expected = build().to(device)(given)
        with forebay.torch.stream(module, device, "512KiB") as stream:
            for _ in range(3):
                assert torch.equal(module(given), expected)
            # Neither in RAM nor on the bus do they take more than in their file.
            quantised = sum(it.numel() for it in weights)
            assert stream.statistics().weight_bytes < quantised + 6 * (128 * 256 * 4 + 4096)
    for block, weight in zip(module, weights, strict=True):
        assert type(block[0].weight) is GGUFParameter and torch.equal(block[0].weight.as_tensor(), weight)


def quantised_file(path, kind, module, plain=()):
    """Write the weights of a module as a GGUF file, and return them as they are there."""
    import gguf
    import numpy

    writer, state = gguf.GGUFWriter(path, "any"), {}
    random = numpy.random.default_rng(4)
    for name, weight in module.state_dict().items():
        if weight.ndim < 2 or name in plain:
            data, of = weight.float().numpy(), gguf.GGMLQuantizationType.F32
        else:
            of = gguf.GGMLQuantizationType[kind]
            elements, nbytes = gguf.GGML_QUANT_SIZES[of]
            # Small bytes are valid blocks, whose scales are finite.
            data = random.integers(0, 32, (weight.shape[0], weight.shape[1] // elements * nbytes), dtype=numpy.uint8)
        state[name] = torch.from_numpy(gguf.quants.dequantize(data, of).reshape(weight.shape).copy()).to(weight.dtype)
        writer.add_tensor(name, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q3_K", "IQ4_XS"])
def test_weights_of_quantised_files_stay_quantised(tmp_path, device, kind, dtype):
    pytest.importorskip("gguf")
    torch.manual_seed(5)
    dtype = getattr(torch, dtype)
    module = Wide().to(dtype).eval()
    state = quantised_file(tmp_path / "weights.gguf", kind, module, plain=("blocks.1.1.weight",))
    module.load_state_dict(state)
    given = torch.randint(1500, (2, 9), device=device)
    expected = resident(module, device)(given)
    for ram in (None, "14MiB"):
        streamed = on_meta(dtype)
        with forebay.torch.stream(streamed, device, "16MiB", ram=ram, source=tmp_path / "weights.gguf") as stream, torch.no_grad():
            for _ in range(5):
                assert torch.equal(streamed(given), expected)
            counts = stream.statistics()
            assert counts.file_bytes < counts.weight_bytes
            assert counts.ram_bytes + counts.buffer_bytes <= (100 if ram is None else 14) * MIB
            for name, tensor in streamed.state_dict().items():
                assert torch.equal(tensor.cpu(), state[name]), name
            streamed.blocks[2][1].weight.zero_()
            changed = streamed(given)
            assert not torch.equal(changed, expected)
            assert torch.equal(streamed(given), changed)
        assert torch.equal(resident(streamed, device)(given), changed)


def test_types_that_cannot_become_others_are_refused(tmp_path):
    pytest.importorskip("gguf")
    module = Wide().eval()
    quantised_file(tmp_path / "weights.gguf", "Q8_0", module)
    with torch.device("meta"):
        streamed = Wide().to(torch.float64).eval()
    with pytest.raises(forebay.OptionError, match="float64"):
        forebay.torch.stream(streamed, "cpu", "40MiB", source=tmp_path / "weights.gguf")


def test_other_methods_are_passes(device):
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = (nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))) for _ in range(2))

        def encode(self, x):
            return self.encoder(x)

        def decode(self, x):
            return self.decoder(x)

        def forward(self, x):
            return self.decode(self.encode(x))

    module, given = Coder().eval(), torch.rand(2, 16, device=device)
    other = resident(module, device)
    expected = other(given)
    with torch.no_grad(), forebay.torch.stream(module, device, 4096) as stream:
        for _ in range(3):
            assert torch.equal(module.decode(module.encode(given)), expected)
        assert stream.statistics().passes == 6
        assert torch.equal(module(given), expected)
        assert stream.statistics().passes == 7
        before = stream.statistics().deviations
        module.decode(module.encode(given))
        assert stream.statistics().deviations == before
    assert not {"encode", "decode", "forward"} & module.__dict__.keys()


def test_compiled_modules_are_right(device):
    module, given = made("language", torch.float32)
    given = given.to(device)
    expected = resident(module, device)(given)
    with torch.no_grad(), forebay.torch.stream(module, device, sizes(module)[0]):
        compiled = torch.compile(module, backend="eager")
        block = torch.compile(module.blocks[0], backend="eager")
        for _ in range(3):
            assert torch.equal(compiled(given), expected)
        x = torch.rand(1, 3, 32, device=device)
        assert torch.equal(block(x), module.blocks[0](x))


def test_adapters_are_beside_streamed_weights(device):
    peft = pytest.importorskip("peft")
    module, given = made("language", torch.float32)
    given = given.to(device)
    config = peft.LoraConfig(target_modules=["up", "down"], r=4, init_lora_weights=False)
    with forebay.torch.stream(module, device, sizes(module)[0]) as stream, torch.no_grad():
        plain = module(given)
        torch.manual_seed(7)
        adapted = peft.get_peft_model(module, config).eval()
        with_adapters = adapted(given)
        assert not torch.equal(with_adapters, plain)
        for _ in range(2):
            assert torch.equal(adapted(given), with_adapters)
        assert stream.statistics().loads > 0
    again, _ = made("language", torch.float32)
    torch.manual_seed(7)
    ordinary = peft.get_peft_model(again, config).eval().to(device)
    with torch.no_grad():
        assert torch.equal(ordinary(given), with_adapters)


def test_transformers_streams_from_its_files(tmp_path, device):
    import forebay.transformers

    model = small_language_model(tmp_path)
    ids = torch.randint(3000, (1, 12), device=device)
    generate = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.to(device).generate(ids, **generate)
    loaded = forebay.transformers.from_pretrained(tmp_path, dtype="auto", stream={"device": device, "vram": "6MiB", "ram": "10MiB"})
    counts = loaded.forebay_stream.statistics()
    assert counts.file_bytes > 0.9 * counts.weight_bytes and counts.ram_bytes < MIB, counts
    assert loaded.device == torch.device(device)
    assert torch.equal(loaded.generate(ids, **generate), expected)
    loaded.forebay_stream.close()
    assert torch.equal(loaded.to(device).generate(ids, **generate), expected)
    with pytest.raises(forebay.OptionError, match="device_map"):
        forebay.transformers.from_pretrained(tmp_path, stream="6MiB", device_map="cpu")
    # The bytes of a weight that was changed after it was loaded are not those of the file.
    from forebay import _mapped

    with _mapped.MappedTensors([tmp_path / "model.safetensors"]) as tensors:
        name = "model.layers.1.mlp.up_proj.weight"
        first, second = tensors.take(name), tensors.take("model.layers.2.mlp.up_proj.weight")
        place = lambda it: _mapped.file_of(it.data_ptr(), it.numel() * it.element_size())  # noqa: E731
        assert place(first) is not None and place(second) is not None
        first[3, 4] += 1
        assert place(first) is None and place(second) is not None
    del tensors, first, second
    gc.collect()


def test_diffusers_streams_from_its_files(tmp_path, device):
    diffusers = pytest.importorskip("diffusers")
    import forebay.diffusers

    torch.manual_seed(1)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=8,
        joint_attention_dim=64, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12),
    ).to(torch.bfloat16).eval()  # fmt: skip
    model.save_pretrained(tmp_path)
    given = {
        "hidden_states": torch.rand(1, 20, 16), "encoder_hidden_states": torch.rand(1, 6, 64), "pooled_projections": torch.rand(1, 32),
        "timestep": torch.tensor([0.5]), "img_ids": torch.rand(20, 3), "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip
    given = {name: it.to(device, torch.bfloat16) for name, it in given.items()}
    expected = resident(model, device)
    with torch.no_grad():
        expected = model.to(device)(**given, return_dict=False)[0]
        loaded = forebay.diffusers.from_pretrained(
            tmp_path, torch_dtype=torch.bfloat16, stream={"device": device, "vram": "2MiB", "ram": "12MiB"}
        )
        counts = loaded.forebay_stream.statistics()
        assert counts.file_bytes > 0.7 * counts.weight_bytes, counts
        for _ in range(3):
            assert torch.equal(loaded(**given, return_dict=False)[0], expected)
        loaded.forebay_stream.close()
        assert torch.equal(loaded.to(device)(**given, return_dict=False)[0], expected)


def test_pipelines_of_diffusers_share_one_budget(tmp_path, device):
    diffusers = pytest.importorskip("diffusers")
    import forebay.diffusers

    torch.manual_seed(4)
    sizes = {"block_out_channels": (32, 64), "norm_num_groups": 8}
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **sizes,
    )  # fmt: skip
    coder = diffusers.VQModel(
        latent_channels=3, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **sizes
    )
    scheduler = diffusers.DDIMScheduler()
    diffusers.LDMPipeline(vqvae=coder, unet=unet, scheduler=scheduler).save_pretrained(tmp_path)

    def picture(pipeline):
        pipeline.set_progress_bar_config(disable=True)
        # The same noise on every device.
        generator = torch.Generator("cpu").manual_seed(5)
        return pipeline(generator=generator, num_inference_steps=3, output_type="np").images

    # Copies, because products on a CPU round in another order where weights begin at odd addresses, as in mapped files.
    plain = diffusers.LDMPipeline(vqvae=copy.deepcopy(coder), unet=copy.deepcopy(unet), scheduler=scheduler)
    expected = picture(plain.to(device))
    pipeline = forebay.diffusers.from_pretrained(tmp_path, stream={"device": device, "vram": "1MiB"})
    for _ in range(2):
        assert (picture(pipeline) == expected).all()
    counts = pipeline.forebay_stream.statistics()
    # Three steps of the one part, and one call of the other.
    assert counts.passes == 8 and counts.loads > 50, counts
    assert {plan.call for plan in pipeline.forebay_stream.plan()} >= {"UNet2DModel.forward", "VQModel.decode"}
