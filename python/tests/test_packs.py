"""Packs: tensors, slices and types are those of the model that they were made from."""

import subprocess

import forebay
import pytest
from test_engine import binary

numpy = pytest.importorskip("numpy", reason="arrays of NumPy are compared, and it is not installed")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with stacks of experts in BF16, and packs of it: as it is, compact, and coded."""
    folder = tmp_path_factory.mktemp("packs")
    source = folder / "model.gguf"
    command = [binary(), "synth", "qwen3moe-tiny", source, "--quantisation", "BF16", "--layers", "1"]
    subprocess.run(command, capture_output=True, check=True)
    packs = {}
    for codec in ("none", "compact", "zstd"):
        packs[codec] = folder / f"{codec}.fbay"
        command = [binary(), "pack", source, "-o", packs[codec], "--codec", codec]
        subprocess.run(command, capture_output=True, check=True)
    return source, packs


def bits(tensor):
    """Return a tensor of BF16 or F32 as numbers of 2 or 4 bytes."""
    if tensor.dtype == "BF16":
        tensor = tensor.view("U16")
    return numpy.from_dlpack(tensor)


def test_slices_of_packs_are_those_of_the_model(models):
    source, packs = models
    whole = {name: bits(tensor) for name, tensor in forebay.load(source, framework="raw").items()}
    names = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_gate_exps.weight", "output_norm.weight"]
    for codec, pack in packs.items():
        stored = {info.dtype for info in forebay.list_tensors(pack).values()}
        assert ("BF16_C256" in stored) == (codec != "none"), stored
        for name in names:
            array = whole[name]
            for dimension, size in enumerate(array.shape):
                for start, stop in ((0, size), (1, 3), (size // 3, size // 3 + size // 2), (size - 1, size), (2, 2)):
                    found = forebay.load(
                        pack, tensors=[name], slices={name: (dimension, start, stop)}, framework="raw"
                    )
                    expected = numpy.take(array, range(start, stop), axis=dimension)
                    assert tuple(found[name].shape) == expected.shape
                    if expected.size:
                        numpy.testing.assert_array_equal(bits(found[name]), expected, f"{codec} {name} {dimension}")
            parts = [(0, 0, 1), (0, 1, array.shape[0])]
            found = [
                bits(tensor)
                for _, tensor in forebay.iter_tensors(pack, tensors=[name], slices={name: parts}, framework="raw")
            ]
            numpy.testing.assert_array_equal(numpy.concatenate(found), array)


def test_weights_of_packs_become_float32(models):
    source, packs = models
    expected = forebay.load(source, dtype="float32", framework="np")
    for pack in packs.values():
        found = forebay.load(pack, dtype="float32", framework="np")
        assert found.keys() == expected.keys()
        for name, array in found.items():
            assert array.dtype == numpy.float32
            numpy.testing.assert_array_equal(array, expected[name])
        name = "blk.0.attn_q.weight"
        part = forebay.load(pack, dtype="float32", tensors=[name], slices={name: (1, 100, 250)}, framework="np")
        numpy.testing.assert_array_equal(part[name], expected[name][:, 100:250])
        for name, array in forebay.iter_tensors(pack, dtype="float32", framework="np", budget="64MiB"):
            numpy.testing.assert_array_equal(array, expected[name])


def test_wrong_slices_and_types_are_errors(models):
    _, packs = models
    for pack in packs.values():
        for given in ((0, 0, 10**6), (3, 0, 1), (0, 2, 1)):
            with pytest.raises(forebay.OptionError, match="slices"):
                forebay.load(pack, tensors=["output_norm.weight"], slices={"output_norm.weight": given})
        with pytest.raises(forebay.OptionError, match="dtype"):
            forebay.load(pack, dtype="float16")
