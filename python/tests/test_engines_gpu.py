"""Weights for engines on real GPUs: right tensors, and VRAM within the budget."""

import forebay
import pytest
from ranks import run_ranks

WHY = "LOADS OF ENGINES TO A GPU NOT CHECKED: "
torch = pytest.importorskip("torch", reason=WHY + "torch is not installed here")
if not torch.cuda.is_available():
    pytest.skip(WHY + "there is no GPU", allow_module_level=True)

import forebay.torch  # noqa: E402


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file of a few bytes, for what a first load leaves behind."""
    file = str(tmp_path_factory.mktemp("small") / "0.safetensors")
    forebay.torch.save_file({"t": torch.arange(9)}, file)
    return [file]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Files of 720 MB with tensors of all sizes, and what the tests compute of each tensor."""
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(2)
    files, sums = [], {}
    for number in range(3):
        shapes = [(40_000, 1024), (14_000, 2048), (9,), (2048, 2048), (2048, 2048), (3, 700, 900), (), (0, 4)]
        tensors = {
            f"f{number}.t{at}": torch.randint(-9000, 9000, shape, dtype=torch.int16, generator=generator)
            for at, shape in enumerate(shapes)
        }
        for at in range(200):
            tensors[f"f{number}.small{at}"] = torch.randn(300, at + 1, generator=generator).to(torch.float8_e4m3fn)
        files.append(str(folder / f"{number}.safetensors"))
        forebay.torch.save_file(tensors, files[-1])
        for name, tensor in tensors.items():
            flat = tensor.reshape(-1).view(torch.uint8)
            sums[name] = [int(flat.sum(dtype=torch.int64)), int(flat[::7].sum(dtype=torch.int64))]
    return files, sums


# The driver gives memory in pieces of 2 MiB.
ROUNDING = 32 << 20


def check(found, sums, budget):
    assert found["sums"] == sums
    assert 0 < found["vram"] <= budget + ROUNDING
    # What PyTorch keeps of freed tensors is there for the process's next ones.
    assert found["vram"] + found["kept"] <= max(budget, 1 << 30) + ROUNDING


@pytest.mark.parametrize("budget", [128 << 20, 256 << 20, 1 << 30])
def test_one_gpu(checkpoint, small, budget):
    files, sums = checkpoint
    (found,) = run_ranks("rank_gpu.py", 1, {"files": files, "small": small, "budget": budget})
    check(found, sums, budget)
    is_large = {name: name.endswith("t0") and budget < 180 << 20 for name in sums}
    assert all((found["places"][name] == "cpu") == is_large[name] for name in sums)


@pytest.mark.parametrize("budget", [128 << 20, 1 << 30])
def test_all_gpus(checkpoint, small, budget):
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(WHY + "there is one GPU only")
    files, sums = checkpoint
    for found in run_ranks("rank_gpu.py", count, {"files": files, "small": small, "budget": budget}):
        check(found, sums, budget)


def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason=WHY + "transformers is not installed here")
    import forebay.transformers

    config = transformers.MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_local_experts=4
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for options in ({"device_map": "cuda:0"}, {"device_map": "auto", "dtype": torch.float16}):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        ours = forebay.transformers.from_pretrained(tmp_path, budget="8MiB", **options)
        one, other = ours.state_dict(), theirs.state_dict()
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert tensor.device == other[name].device and torch.equal(tensor, other[name]), name
