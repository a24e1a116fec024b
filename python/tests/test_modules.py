"""Modules of PyTorch whose weights are in memory a part at a time. Without PyTorch, nothing here is checked."""

import copy
import gc
import pickle
import random
import threading
import warnings

import forebay
import pytest

try:
    import torch
except ImportError:
    torch = None
    warnings.warn("MODULES OF PYTORCH NOT CHECKED: torch is not installed here", stacklevel=1)

pytestmark = pytest.mark.skipif(torch is None, reason="MODULES OF PYTORCH NOT CHECKED: torch is not installed here")

if torch is not None:
    from torch import nn

    import forebay.torch

    class Block(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.norm = nn.LayerNorm(size)
            self.attention = nn.MultiheadAttention(size, 4, batch_first=True)
            self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size, bias=False)
            self.scale = nn.Parameter(torch.rand(size))

        def forward(self, x):
            y = self.norm(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            return x + self.scale * self.down(nn.functional.gelu(self.up(x)))

    class Language(nn.Module):
        """Embeddings that are the output projection, too; a block that is used twice; branches."""

        def __init__(self, size=32, vocabulary=100):
            super().__init__()
            self.embed = nn.Embedding(vocabulary, size)
            self.blocks = nn.ModuleList(Block(size) for _ in range(4))
            self.other = Block(size)
            self.head = nn.Linear(size, vocabulary, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids, branch=False):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            x = self.other(x) if branch else self.blocks[1](x)
            return self.head(x)

    class Picture(nn.Module):
        """Convolutions, one of which has its channels last, and statistics."""

        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
            self.second = nn.ConvTranspose2d(16, 8, 3).to(memory_format=torch.channels_last)
            self.out = nn.Linear(8, 5)

        def forward(self, x):
            return self.out(self.second(torch.relu(self.norm(self.first(x)))).mean((2, 3)))

    class Functional(nn.Module):
        """Uses weights outside of their modules."""

        def __init__(self):
            super().__init__()
            self.embed, self.linear = nn.Embedding(50, 16), nn.Linear(16, 16)

        def forward(self, ids):
            x = nn.functional.embedding(ids, self.embed.weight) + self.linear.bias
            x = x @ self.linear.weight.t() * self.linear.weight[0]
            return nn.functional.linear(torch.cat([x, self.linear.weight]), self.embed.weight)


def made(kind, dtype, seed=1):
    """Return a module and its input."""
    torch.manual_seed(seed)
    if kind == "language":
        return Language().to(dtype).eval(), torch.randint(100, (2, 7))
    if kind == "picture":
        return Picture().to(dtype).eval(), torch.rand(2, 3, 9, 9, dtype=dtype)
    if kind == "functional":
        return Functional().to(dtype).eval(), torch.randint(50, (5,))
    if kind == "transformer":
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        return nn.TransformerEncoder(layer, 3).to(dtype).eval(), torch.rand(2, 5, 32, dtype=dtype)
    if kind == "recurrent":
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)).to(dtype).eval(), torch.rand(3, 8, dtype=dtype)
    return nn.Linear(8, 16).to(dtype).eval(), torch.rand(3, 8, dtype=dtype)


DEVICES = ["cpu"]
if torch is not None and torch.cuda.is_available():
    DEVICES.append("cuda:0")
else:
    warnings.warn("MODULES ON A GPU NOT CHECKED: PyTorch finds none here", stacklevel=1)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def resident(module, device):
    """Return a function that calls a copy of the module with all weights in the device."""
    other = copy.deepcopy(module).to(device)

    def call(*args):
        with torch.no_grad():
            return other(*args)

    return call


KINDS = ["language", "picture", "functional", "transformer", "recurrent", "linear"]


def sizes(module):
    """Return memory of three sizes: about the smallest one, a middle one, and enough for all weights."""
    sizes, inside = [], set()
    for it in module.modules():
        if it in inside:
            continue
        together = isinstance(it, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
        own = list(it.parameters(recurse=together))
        inside.update(it.modules() if together else [it])
        stays = not together and any(True for _ in it.children())
        sizes.append((stays, sum(-(-of.numel() * of.element_size() // 512) * 512 for of in own)))
    least = sum(size for stays, size in sizes if stays) + max([size for stays, size in sizes if not stays], default=0)
    return [least, least * 3 // 2, 2 * sum(size for _, size in sizes) + 10_000]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_results_equal_those_of_the_module(kind, dtype, device):
    module, given = made(kind, getattr(torch, dtype))
    ordinary, there = module(given), given.to(device)
    expected = resident(module, device)(there)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for vram in sizes(module):
        with forebay.torch.stream(module, device=device, vram=vram) as stream, torch.no_grad():
            for _ in range(3):
                assert torch.equal(module(there), expected)
            assert stream.statistics().passes == 3
            saved = module.state_dict()
            assert saved.keys() == state.keys()
            for name, tensor in state.items():
                assert torch.equal(saved[name].cpu(), tensor) and saved[name].stride() == tensor.stride(), name
            for name, parameter in module.named_parameters():
                tensor = state[name]
                assert (parameter.shape, parameter.dtype) == (tensor.shape, tensor.dtype)
                assert parameter.device == torch.device(device)
        assert torch.equal(module(given), ordinary), "after the end"
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, state[name]) and tensor.stride() == state[name].stride(), name
        assert all(type(it) is nn.Parameter and it.requires_grad for it in module.parameters())


def test_shared_weights_stay_shared(device):
    module, given = made("language", torch.float32)
    with forebay.torch.stream(module, device=device, vram=sizes(module)[0]):
        assert module.head.weight is module.embed.weight
    assert module.head.weight is module.embed.weight and type(module.head.weight) is nn.Parameter


def test_passes_that_differ_are_right(device):
    module, _ = made("language", torch.bfloat16)
    choose = random.Random(1)
    inputs = [torch.randint(100, (size, 5), device=device) for size in (1, 2, 3)]
    call = resident(module, device)
    expected = {(at, branch): call(ids, branch) for at, ids in enumerate(inputs) for branch in (False, True)}
    with torch.no_grad():
        with forebay.torch.stream(module, device=device, vram=sizes(module)[0]) as stream:
            for _ in range(60):
                at, branch = choose.randrange(3), choose.random() < 0.3
                assert torch.equal(module(inputs[at], branch), expected[at, branch])
            counts = stream.statistics()
    assert counts.deviations > 0 and counts.loads > 60


def test_what_stays_is_not_loaded_again(device):
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(20))).to(torch.bfloat16).eval()
    weight = 64 * 64 * 2
    with forebay.torch.stream(module, device=device, vram=12 * weight) as stream, torch.no_grad():
        loads = []
        for _ in range(10):
            module(torch.rand(1, 64, dtype=torch.bfloat16, device=device))
            loads.append(stream.statistics().loads)
        assert loads[-1] - loads[3] <= 6 * 11 + 12, loads
        assert stream.statistics().ram_bytes < 0.75 * stream.statistics().weight_bytes
        assert stream.statistics().weight_bytes == 20 * weight


def test_threads_share_a_module(device):
    module, given = made("language", torch.float32)
    inputs = [torch.randint(100, (1, size), device=device) for size in range(1, 9)]
    wrong, call = [], resident(module, device)
    expected = [call(ids) for ids in inputs]

    def work(at):
        with torch.no_grad():
            for _ in range(15):
                if not torch.equal(module(inputs[at]), expected[at]):
                    wrong.append(at)

    with forebay.torch.stream(module, device=device, vram=sizes(module)[0]):
        threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert wrong == []


def test_a_pass_that_fails_changes_nothing(device):
    module, given = made("language", torch.float32)
    given = given.to(device)
    expected = resident(module, device)(given)
    with torch.no_grad():
        with forebay.torch.stream(module, device=device, vram=sizes(module)[0]) as stream:
            assert torch.equal(module(given), expected)
            for kind in (ValueError, KeyboardInterrupt):
                def fails(*_, kind=kind):
                    raise kind("on purpose")

                hook = module.blocks[2].up.register_forward_hook(fails)
                with pytest.raises(kind):
                    module(given)
                hook.remove()
                assert torch.equal(module(given), expected)
            assert stream.statistics().passes == 3
            assert all(unit.in_use == 0 for unit in stream._units)


def test_hooks_of_others_and_moves_to_the_same_device_work(device):
    module, given = made("recurrent", torch.float32)
    seen, given = [], given.to(device)
    module[0].register_forward_hook(lambda it, args, result: seen.append((args[0].shape, float(it.weight.sum()))))
    expected = resident(module, device)(given)
    with torch.no_grad():
        with forebay.torch.stream(module, device=device, vram=sizes(module)[0]):
            assert module.to(device) is module and module.to(torch.float32) is module
            assert module.requires_grad_(False) is module
            assert torch.equal(module.eval()(given), expected)
            assert module[0].weight.get_device() == (-1 if device == "cpu" else 0)
            assert module[0].weight.sum() == seen[0][1]
            assert len(repr(module[0].weight)) < 200 and not module[0].weight.is_meta
    assert seen[0] == seen[1]


def test_several_modules_share_the_memory(device):
    first, given = made("recurrent", torch.float32)
    second, given = nn.Linear(16, 16).eval(), given.to(device)
    first_resident, second_resident = resident(first, device), resident(second, device)
    expected = second_resident(second_resident(first_resident(given)))
    with torch.no_grad():
        with forebay.torch.stream([first, second], device=device, vram=2048) as stream:
            for _ in range(5):
                assert torch.equal(second(second(first(given))), expected)
            assert stream.statistics().passes == 15


def test_what_cannot_be_is_refused_in_words():
    module, given = made("language", torch.float32)
    stream = forebay.torch.stream
    with pytest.raises(forebay.OptionError, match="eval"):
        stream(module.train(), device="cpu")
    module.eval()
    with pytest.raises(forebay.OutOfMemoryError, match="bytes"):
        stream(module, device="cpu", vram=1000)
    with torch.no_grad():
        module(given)  # It still has its weights.
    for options in ({"codec": "best"}, {"device": "meta"}, {"vram": "8"}):
        with pytest.raises(forebay.OptionError):
            stream(module, **{"device": "cpu", **options})
    with pytest.raises(forebay.OptionError, match="Module"):
        stream([module, 3], device="cpu")
    with pytest.raises(forebay.OptionError, match="no weights"):
        stream(nn.ReLU().eval(), device="cpu")
    with pytest.raises(forebay.OptionError, match="meta"):
        stream(nn.Linear(2, 2, device="meta").eval(), device="cpu")
    with stream(module, device="cpu", vram=sizes(module)[0]) as handle:
        with pytest.raises(forebay.OptionError, match="already"):
            stream(module, device="cpu")
        for change in (
            lambda: module.half(), lambda: copy.deepcopy(module), lambda: pickle.dumps(module), lambda: module.requires_grad_(True),
            lambda: module.head.weight.requires_grad_(), lambda: module.head.weight.requires_grad_(requires_grad=True),
        ):  # fmt: skip
            with pytest.raises((forebay.OptionError, RuntimeError), match="close the stream"), torch.no_grad():
                change()
        with pytest.raises(forebay.OptionError, match="gradients"):
            module.blocks[0](torch.rand(1, 2, 32, requires_grad=True))
        embedding = module.embed.forward
    handle.close()
    with pytest.raises(forebay.Error, match="closed"):
        embedding(given)


def test_memory_is_given_back(device):
    module, given = made("language", torch.float32)
    stream = forebay.torch.stream(module, device=device, vram=sizes(module)[0])
    with torch.inference_mode():
        expected = module(given.to(device))
    with torch.autocast(torch.device(device).type, enabled=False):
        assert torch.equal(module(given.to(device)), expected)
    stream.close()
    assert stream.statistics().passes == 2
    del stream
    gc.collect()
    assert "forward" not in module.__dict__ and "forward" not in module.embed.__dict__
    assert not any(it._state_dict_hooks for it in module.modules())
