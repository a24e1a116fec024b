"""Tensors of PyTorch. Without PyTorch, nothing here is checked."""

import warnings

import forebay
import pytest
from conftest import BITS

try:
    import torch
except ImportError:
    torch = None
    warnings.warn("TENSORS OF PYTORCH NOT CHECKED: torch is not installed here", stacklevel=1)

needs_torch = pytest.mark.skipif(torch is None, reason="TENSORS OF PYTORCH NOT CHECKED: torch is not installed here")


@needs_torch
def test_every_type(every_type):
    import safetensors
    import safetensors.torch

    path, tensors = every_type
    known = [name for name in tensors if not name.startswith("F6")]
    found = forebay.load(path, tensors=known, framework="pt")
    with safetensors.safe_open(path, framework="pt") as theirs:
        for name in known:
            wanted = theirs.get_tensor(name)
            assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape), name
            if wanted.numel():
                flat = [it.reshape(-1).view(torch.uint8) for it in (found[name], wanted)]
                assert torch.equal(*flat), name
    assert forebay.load(path, tensors=["F6_E2M3.matrix"])["F6_E2M3.matrix"].dtype == torch.uint8
    assert len(known) > len(BITS)


@needs_torch
def test_saved_files_equal_safetensors(tmp_path):
    import forebay.torch
    import safetensors.torch

    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]
    tensors = {str(kind): torch.randn(5, 3).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    forebay.torch.save_file(tensors, ours, {"a": "b"})
    safetensors.torch.save_file(tensors, theirs, {"a": "b"})
    assert ours.read_bytes() == theirs.read_bytes()
    found = forebay.torch.load_file(ours)
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in tensors.items())
    whole = torch.zeros(4, 4)
    with pytest.raises(forebay.SharedMemoryError):
        forebay.torch.save_file({"a": whole, "b": whole[1:]}, ours)
    with pytest.raises(ValueError, match="contiguous"):
        forebay.torch.save_file({"a": whole.t()[1:]}, ours)


@needs_torch
def test_memory_outlives_the_dict(random_file):
    path, arrays = random_file([(1000, 1000)])
    view = forebay.load(path, framework="pt")["t0"][3:]
    assert torch.equal(view, torch.from_numpy(arrays["t0"][3:]))


@pytest.mark.skipif(torch is not None, reason="torch is installed")
def test_without_torch(every_type):
    import forebay.torch

    path, _ = every_type
    with pytest.raises(ImportError, match="pip install torch"):
        forebay.load(path, framework="pt")
    with pytest.raises(ImportError, match="pip install torch"):
        forebay.torch.load_file(path)
    with pytest.raises(ImportError, match="pip install torch"):
        forebay.torch.save_file({}, path)
