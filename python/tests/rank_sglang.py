"""A rank of test_sglang.py: loads models with SGLang's own loader and with forebay, on the CPU, and compares them."""

import json
import logging
import os
import sys
import warnings

given = json.loads(sys.argv[1])
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import functools  # noqa: E402
import importlib.abc  # noqa: E402
import importlib.machinery  # noqa: E402
import types  # noqa: E402


class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for SGLang's kernels, which cannot be imported without CUDA. To call one is an error."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        module.__getattr__ = Kernel


class Kernel:
    def __init__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self.name = name

    def __getattr__(self, name):
        return Kernel(name)

    def __call__(self, *_, **__):
        raise RuntimeError(f"kernel {self.name} was called without CUDA")


try:
    import sgl_kernel  # noqa: F401
except ImportError:
    sys.meta_path.insert(0, Kernels())

import torch  # noqa: E402
from forebay import _weights  # noqa: E402
from ranks import equal, error_of  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.layers.moe import initialize_moe_config  # noqa: E402
from sglang.srt.layers.utils.common import PPMissingLayer  # noqa: E402
from sglang.srt.model_loader import get_model_loader, loader  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, spawn_world_rank  # noqa: E402
from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402

read = []
open_stream = _weights.open_stream


def recorded(table, parts, device, budget):
    read.extend((entry.name, list(part or ()), _weights.part_bytes(entry, part)) for entry, part in parts)
    return open_stream(table, parts, device, budget)


_weights.open_stream = recorded

# Groups of gloo, without NCCL.
parallel_state.init_model_parallel_group = functools.partial(
    parallel_state.init_model_parallel_group, use_pynccl=False, use_custom_allreduce=False
)

# Kernels of SGLang for this CPU are not installed. They would pack the weights after the load.
loader.DefaultModelLoader.postprocess_weights = staticmethod(lambda model, target_device: None)


def prepare(folder, options):
    """Set up SGLang's processes for a model, and return its configuration."""
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
    args = ServerArgs(
        model_path=folder, device="cpu", skip_tokenizer_init=True, dtype="bfloat16", tp_size=given["size"], **options
    )
    args.resolve_once()
    rank = spawn_world_rank(args, tp_rank=given["rank"], pp_rank=0)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=given["rank"]))
    initialize_moe_config()
    config = ModelConfig.from_server_args(args)
    if not torch.distributed.is_initialized():
        parallel_state.init_distributed_environment(
            world_size=given["size"],
            rank=given["rank"],
            distributed_init_method=f"tcp://127.0.0.1:{given['port']}",
            local_rank=given["rank"],
            backend="gloo",
        )
    get_parallel().override_permanently(world_group=parallel_state._WORLD)
    parallel_state.initialize_model_parallel()
    initialize_dp_attention(args)
    return config


def load(config, load_format, extra=None):
    torch.manual_seed(given["rank"])
    it = get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=extra or {}), config)
    return it.load_model(model_config=config, device_config=DeviceConfig("cpu")), it


results = {}
for name, case in given["cases"].items():
    config = prepare(case["folder"], case.get("options", {}))
    theirs, _ = load(config, "auto")
    read.clear()
    ours, it = load(config, "forebay", case.get("extra"))
    results[name] = {
        "equal": equal(ours, theirs),
        "class": type(ours).__name__,
        "loader": [kind.__name__ for kind in type(it).__mro__],
        "read": list(read),
    }
    if case.get("missing_layers"):
        # As on another stage of a pipeline.
        for number in case["missing_layers"]:
            ours.model.layers[number] = PPMissingLayer()
        read.clear()
        dict(it._get_all_weights(config, ours))
        results[name]["read"] = list(read)
    if case.get("draft"):
        # A draft model that gets one of several layers for prediction.
        both = []
        for load_format in ("auto", "forebay"):
            chosen = LoadConfig(load_format=load_format, draft_model_idx=case["draft"])
            read.clear()
            found = get_model_loader(chosen, config)
            both.append(dict(found._get_weights_iterator(loader.DefaultModelLoader.Source(case["weights"], None))))
        assert both[0].keys() == both[1].keys() and all(torch.equal(both[0][it], both[1][it]) for it in both[0])
        results[name]["draft"] = [sorted(both[1]), sorted({it for it, *_ in read})]
    if case.get("update"):
        # As SGLang's update_weights_from_disk does.
        for parameter in ours.parameters():
            parameter.data.fill_(0)
        source = loader.DefaultModelLoader.Source.init_new(config, ours)
        it.load_weights_and_postprocess(ours, it._get_weights_iterator(source), torch.device("cpu"))
        results[name]["updated"] = equal(ours, theirs)
for name, case in given.get("errors", {}).items():
    config = prepare(case["folder"], case.get("options", {}))
    if "quantization" in case:
        config.quantization = case["quantization"]
    results[name] = {"error": error_of(lambda case=case, config=config: load(config, "forebay", case.get("extra")))}
arguments = ["--model-path", next(iter(given["cases"].values()))["folder"], "--load-format", "forebay"]
results["server_args"] = prepare_server_args([*arguments, "--device", "cpu"]).load_format
torch.distributed.barrier()
torch.distributed.destroy_process_group()
print(json.dumps(results))
