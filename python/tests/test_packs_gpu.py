"""Packs on a real GPU: tensors, slices and float32 have the bits that a load to host memory gives."""

import forebay
import pytest
from test_packs import models  # noqa: F401

WHY = "LOADS OF PACKS TO A GPU NOT CHECKED: "
torch = pytest.importorskip("torch", reason=WHY + "torch is not installed here")
if not torch.cuda.is_available():
    pytest.skip(WHY + "there is no GPU", allow_module_level=True)

STACK, MATRIX = "blk.0.ffn_gate_exps.weight", "blk.0.attn_q.weight"
SLICES = ({STACK: (0, 1, 3)}, {STACK: (1, 2, 9)}, {STACK: (2, 100, 150), MATRIX: (1, 7, 8)}, {MATRIX: (0, 5, 5)})


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        host = expected[name]
        assert tensor.is_cuda and (tensor.dtype, tensor.shape) == (host.dtype, host.shape), name
        flat = [it.cpu().contiguous().reshape(-1).view(torch.uint8) for it in (tensor, host)]
        assert torch.equal(*flat), name


@pytest.mark.parametrize("codec", ["none", "compact", "zstd"])
def test_packs(models, codec):  # noqa: F811
    source, packs = models
    plain, pack = packs["none"], packs[codec]
    for slices in SLICES:
        options = {"tensors": list(slices), "slices": slices}
        equal(forebay.load(pack, device="cuda", **options), forebay.load(plain, **options))
    expected = forebay.load(source, dtype="float32")
    equal(forebay.load(pack, dtype="float32", device="cuda"), expected)
    # So small a budget gives small batches.
    equal(dict(forebay.iter_tensors(pack, dtype="float32", device="cuda", budget="16MiB")), expected)
    part = {"tensors": [MATRIX], "slices": {MATRIX: (1, 100, 250)}, "dtype": "float32"}
    equal(forebay.load(pack, device="cuda", **part), forebay.load(source, **part))
