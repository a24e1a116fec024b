"""A rank of test_vllm.py: loads models with vLLM's own loader and with forebay, on the CPU, and compares them."""

import json
import logging
import os
import sys
import types

given = json.loads(sys.argv[1])
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
logging.disable(logging.WARNING)

import torch  # noqa: E402
import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

# vLLM built for CUDA finds no platform without a GPU.
vllm.platforms._current_platform = CpuPlatform()

from forebay import _weights  # noqa: E402
from ranks import equal, error_of  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: E402
from vllm.model_executor.model_loader.reload.inplace import reload_weights  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

read = []
open_stream = _weights.open_stream


def recorded(table, parts, device, budget):
    read.extend((entry.name, list(part or ()), _weights.part_bytes(entry, part)) for entry, part in parts)
    return open_stream(table, parts, device, budget)


_weights.open_stream = recorded
load_general_plugins()


def config_of(folder, load_format, extra, options):
    arguments = {"max_model_len": 64, "dtype": "bfloat16", "enforce_eager": True, "skip_tokenizer_init": True}
    return EngineArgs(
        model=folder,
        load_format=load_format,
        model_loader_extra_config=extra,
        tensor_parallel_size=given["size"],
        **arguments,
        **options,
    ).create_engine_config()


def load(folder, load_format, extra=None, options=None, changed=None):
    """Return a model with its weights. What vLLM does with them afterwards needs its kernels."""
    config = config_of(folder, load_format, extra or {}, options or {})
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            address = f"tcp://127.0.0.1:{given['port']}"
            init_distributed_environment(given["size"], given["rank"], address, given["rank"], "gloo")
        # Groups of models with experts differ.
        destroy_model_parallel()
        initialize_model_parallel(given["size"])
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
            for parameter in model.parameters():
                parameter.data.fill_(0)
            loader.load_weights(model, config.model_config)
    return model, loader, config


results = {}
for name, case in given["cases"].items():
    theirs, _, _ = load(case["folder"], "auto", options=case.get("options"))
    read.clear()
    ours, loader, config = load(case["folder"], "forebay", case.get("extra"), case.get("options"))
    if case.get("missing_layers"):
        # As on another stage of a pipeline: layers that this rank does not have.
        from vllm.model_executor.models.utils import PPMissingLayer

        for model in (theirs, ours):
            for number in case["missing_layers"]:
                model.model.layers[number] = PPMissingLayer()
        from vllm.model_executor.models import utils

        utils._model_to_pp_missing_layer_names.clear()
        read.clear()
        with set_current_vllm_config(config):
            loader.load_weights(ours, config.model_config)
    results[name] = {
        "equal": equal(ours, theirs),
        "class": type(ours).__name__,
        "loader": type(loader).__name__,
        "read": list(read),
    }
    if case.get("reload"):
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            process_weights_after_loading(ours, config.model_config, torch.device("cpu"))
            for parameter in ours.parameters():
                parameter.data.fill_(0)
            before = {name: parameter.data_ptr() for name, parameter in ours.named_parameters()}
            reload_weights(config, ours, None, None, True)
            results[name]["reloaded"] = equal(ours, theirs)
            after = {name: parameter.data_ptr() for name, parameter in ours.named_parameters()}
            results[name]["in_place"] = before == after


def all_weights(load_format, extra, folder, other):
    """Return what a loader yields for a model that has several sources."""
    config = config_of(folder, load_format, extra, {})
    # As with tables that vLLM keeps in host memory.
    object.__setattr__(config, "engram_config", types.SimpleNamespace(cpu_offload=True))
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        model = torch.nn.Linear(1, 1)
        model.is_unused_checkpoint_weight = lambda name: "mlp" in name
        model.secondary_weights = [
            DefaultModelLoader.Source(other, None, prefix="other."),
            DefaultModelLoader.Source(other, None, prefix="old.", allow_patterns_overrides=["*.bin"]),
        ]
        return dict(loader.get_all_weights(config.model_config, model))


if "sources" in given:
    theirs = all_weights("auto", {}, *given["sources"])
    read.clear()
    ours = all_weights("forebay", {"budget": "1MiB"}, *given["sources"])
    assert not set(ours) - set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    results["sources"] = {"names": sorted(ours), "left_out": sorted(set(theirs) - set(ours)), "read": list(read)}
arguments = FlexibleArgumentParser()
EngineArgs.add_cli_args(arguments)
results["command line"] = arguments.parse_args(["--load-format", "forebay"]).load_format
for name, case in given.get("errors", {}).items():
    results[name] = {
        "error": error_of(lambda case=case: load(case["folder"], "forebay", case.get("extra"), case.get("options")))
    }
torch.distributed.barrier()
torch.distributed.destroy_process_group()
print(json.dumps(results))
