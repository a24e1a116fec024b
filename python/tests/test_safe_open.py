"""`forebay.safe_open` answers as `safetensors.safe_open` does."""

import forebay
import numpy
import pytest
import safetensors
from conftest import fixtures


def test_it_answers_as_safetensors(every_type, random_file):
    path, _ = every_type
    with forebay.safe_open(path, framework="np") as ours, safetensors.safe_open(path, framework="np") as theirs:
        assert ours.keys() == list(theirs.keys())
        assert ours.offset_keys() == list(theirs.offset_keys())
        assert ours.metadata() == theirs.metadata()
        for name in ours.keys():
            assert ours.get_slice(name).get_shape() == list(theirs.get_slice(name).get_shape())
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
    path, arrays = random_file([(9, 6, 5), (4,), (), (0, 3)])
    with forebay.safe_open(path, framework="np") as ours, safetensors.safe_open(path, framework="np") as theirs:
        assert ours.metadata() is None and theirs.metadata() is None
        for name, array in ours.get_tensors().items():
            numpy.testing.assert_array_equal(array, theirs.get_tensor(name))
            numpy.testing.assert_array_equal(array, ours.get_tensor(name))
            numpy.testing.assert_array_equal(array, arrays[name])
    with pytest.raises(forebay.Error, match="closed"):
        ours.keys()


@pytest.mark.parametrize(
    "index",
    [
        slice(2, 5), slice(None), slice(-3, None), slice(4, 2), slice(0, 100), 3, -1, (slice(None), slice(1, 4)),
        (slice(None), slice(None), slice(2, 3)), (..., slice(1, 3)), (2, ..., 1), (slice(1, 8), 2), (3, 4, 1), ...,
        (slice(1, 9), slice(2, 4), slice(0, 5)), (),
    ],
    ids=str,
)  # fmt: skip
def test_indices(random_file, index):
    path, arrays = random_file([(9, 6, 5)])
    with forebay.safe_open(path, framework="np") as file:
        found = file.get_slice("t0")[index]
    numpy.testing.assert_array_equal(found, arrays["t0"][index])
    assert numpy.asarray(found).flags.c_contiguous
    assert found.shape == arrays["t0"][index].shape


def test_more_indices(random_file):
    path, arrays = random_file([(9, 6)])
    with forebay.safe_open(path, framework="np") as file:
        cut = file.get_slice("t0")
        numpy.testing.assert_array_equal(cut[1:8:3], arrays["t0"][1:8:3])
        numpy.testing.assert_array_equal(cut[:, ::2], arrays["t0"][:, ::2])
        for index in (9, -10, (0, 6), (0, 0, 0)):
            with pytest.raises(IndexError):
                cut[index]
        for index in (slice(None, None, -1), "a", 1.5):
            with pytest.raises(forebay.OptionError):
                cut[index]
        with pytest.raises(forebay.TensorNotFoundError):
            file.get_slice("t7")


def test_rows_of_blocks():
    listed = {file: forebay.list_tensors(file) for file in (fixtures() / "gguf").rglob("*.gguf")}
    all_of_them = ((file, name, it) for file, tensors in listed.items() for name, it in tensors.items())
    is_fit = lambda it: it.dtype.startswith("Q") and it.shape[0] > 4 and len(it.shape) == 2  # noqa: E731
    file, name = next((file, name) for file, name, it in all_of_them if is_fit(it))
    whole = numpy.from_dlpack(forebay.load(file, tensors=[name], framework="raw")[name])
    with forebay.safe_open(file, framework="np") as opened:
        cut = opened.get_slice(name)
        numpy.testing.assert_array_equal(cut[1:3], whole[1:3])
        numpy.testing.assert_array_equal(cut[..., 5:40], whole[..., 5:40])


def test_numpy_without_a_type(every_type):
    pytest.importorskip("numpy")
    try:
        import ml_dtypes  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        pytest.skip("ml_dtypes is installed")
    path, _ = every_type
    with forebay.safe_open(path, framework="np") as file:
        with pytest.raises(forebay.OptionError, match="ml_dtypes"):
            file.get_tensor("BF16.matrix")
    assert isinstance(forebay.load(path, tensors=["U8.matrix"], framework="np")["U8.matrix"], numpy.ndarray)


def test_a_failed_save_keeps_the_file(tmp_path):
    import forebay.numpy

    path = tmp_path / "a.safetensors"
    forebay.numpy.save_file({"a": numpy.arange(5)}, path)
    before = path.read_bytes()
    with pytest.raises(forebay.OptionError, match="'b'"):
        forebay.numpy.save_file({"a": numpy.arange(6), "b": "text"}, path)
    with pytest.raises(forebay.OptionError, match="datetime"):
        forebay.numpy.save_file({"a": numpy.zeros(3, "M8[s]")}, path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    forebay.numpy.save_file({"a": numpy.arange(12).reshape(3, 4).T}, path)
    numpy.testing.assert_array_equal(forebay.numpy.load_file(path)["a"], numpy.arange(12).reshape(3, 4).T)
    with pytest.raises(forebay.WriteError):
        forebay.numpy.save_file({"a": numpy.arange(5)}, tmp_path / "none" / "a.safetensors")
