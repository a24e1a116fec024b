"""Load format "forebay" of SGLang: `python -m sglang.launch_server --model-path MODEL --load-format forebay`.

SGLang finds it by the entry point group `sglang.srt.plugins`. Options go into `--model-loader-extra-config`:

| option | meaning |
| --- | --- |
| `budget` | memory of the device that the load uses at once beside SGLang's parameters, such as "1GiB", the default |
| `share` | false makes each rank read all files. By default, all ranks that load together read each byte once |
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ._errors import OptionError
from ._weights import Ranks, inside_layers, options_of, read_with_bar

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader

__all__ = ["register"]

_OPTIONS = {"budget": object, "share": bool}

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\..*\.(?:weight|weight_packed)$")


def register() -> None:
    """Add load format "forebay" to SGLang. SGLang calls this in each of its processes."""
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "forebay" in LOAD_FORMAT_CHOICES:
        return
    add_load_format_choices(["forebay"])
    HookRegistry.register(
        "sglang.srt.configs.load_config.LoadConfig._verify_load_format", verify_load_format, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.model_loader.loader.get_model_loader", get_model_loader, HookType.AROUND)


def verify_load_format(original: Callable[[LoadConfig], None], config: LoadConfig) -> None:
    """Accept "forebay", which SGLang's own check does not know."""
    if isinstance(config.load_format, str) and config.load_format.lower() == "forebay":
        config.load_format = "forebay"
        return
    original(config)


def get_model_loader(
    original: Callable[..., BaseModelLoader], load_config: LoadConfig, model_config: ModelConfig | None = None
) -> BaseModelLoader:
    """Return the loader that SGLang would use for "auto", except that forebay reads the files.

    Raises OptionError if that loader does not read weights from safetensors files.
    """
    if load_config.load_format != "forebay":
        return original(load_config, model_config)
    from sglang.srt.model_loader import loader

    options = options_of(load_config.model_loader_extra_config, _OPTIONS, "model_loader_extra_config")
    found = dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={})
    usual = type(original(found, model_config))
    if usual is not loader.DefaultModelLoader and not (
        usual in (loader.ModelOptModelLoader, loader.IncModelLoader)
        and model_config is not None
        and model_config._is_already_quantized()
    ):
        raise OptionError(
            f"load format forebay cannot be used with this quantization: SGLang makes the weights by its "
            f"{usual.__name__}. Use --load-format auto"
        )
    return loader_class(usual)(found, options)


@functools.cache
def loader_class(base: type[DefaultModelLoader]) -> type[DefaultModelLoader]:
    """Return a loader of SGLang that reads with forebay."""
    from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors
    from sglang.srt.runtime_context import get_model

    class ForebayModelLoader(base):  # type: ignore[valid-type, misc]
        """A loader of SGLang, except that forebay reads the files."""

        def __init__(self, load_config: LoadConfig, options: dict[str, Any]) -> None:
            super().__init__(load_config)
            self.options = options
            self.is_elsewhere: Callable[[str], bool] = lambda name: False

        def _get_all_weights(
            self, model_config: ModelConfig, model: torch.nn.Module
        ) -> Iterator[tuple[str, torch.Tensor]]:
            self.is_elsewhere = elsewhere(model)
            yield from super()._get_all_weights(model_config, model)

        def _get_weights_iterator(
            self,
            source: DefaultModelLoader.Source,
            *,
            resolved_source: DefaultModelLoader.ResolvedSource | None = None,
            startup_prefetch_started: bool = False,
            startup_prefetch_active: bool = False,
        ) -> Iterator[tuple[str, torch.Tensor]]:
            for option in (
                "weight_loader_disable_mmap",
                "weight_loader_prefetch_checkpoints",
                "weight_loader_drop_cache_after_load",
            ):
                if getattr(get_model(), option):
                    flag = option.replace("_", "-")
                    raise OptionError(f"--{flag} has no effect with load format forebay: leave it away")
            if startup_prefetch_started:
                raise OptionError("load format forebay cannot be used when SGLang loads while it captures graphs")
            if resolved_source is not None:
                files, is_safetensors = list(resolved_source.weight_files), resolved_source.use_safetensors
            else:
                folder, files, is_safetensors = self._prepare_weights(
                    source.model_or_path,
                    source.revision,
                    source.fall_back_to_pt,
                    source.allow_patterns_overrides,
                )
                if is_safetensors and source.model_config is not None:
                    index = "model.safetensors.index.json"
                    files = maybe_add_mtp_safetensors(files, folder, index, source.model_config.hf_config)
            if not is_safetensors:
                raise OptionError(
                    f"{source.model_or_path} has no safetensors files, which load format forebay needs: "
                    "use --load-format auto"
                )
            if all(os.path.basename(file).startswith("consolidated") for file in files):
                raise OptionError(
                    f"{source.model_or_path} is in Mistral's own format, which load format forebay does not read in "
                    "SGLang: use --load-format mistral"
                )
            draft = self.load_config.draft_model_idx

            def wanted(name: str) -> bool:
                if draft is not None:
                    found = self._MTP_PATTERN.match(name)
                    return found is None or int(found[1]) == draft
                return not self.is_elsewhere(source.prefix + name)

            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()
            weights = read_with_bar(
                files,
                device_of(),
                is_first(),
                budget=self.options.get("budget", "1GiB"),
                ranks=ranks_of(self.load_config) if self.options.get("share", True) else None,
                choose=lambda names: map(wanted, names),
            )
            if draft is not None:
                return self._filter_mtp_weights(weights, source.prefix, draft)
            return ((source.prefix + name, tensor) for name, tensor in weights)

    ForebayModelLoader.__name__ = f"Forebay{base.__name__}"
    return ForebayModelLoader


def device_of() -> str:
    """Return the device to read to: the GPU of this process, or "cpu" where there is no GPU of NVIDIA."""
    import torch
    from sglang.srt.runtime_context import get_device
    from sglang.srt.utils import is_cuda

    if not is_cuda() or torch.device(get_device().device).type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def is_first() -> bool:
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def ranks_of(load_config: LoadConfig) -> Ranks | None:
    """Return the ranks that load at the same time, as SGLang says, or None for one rank."""
    import torch
    from sglang.srt.configs.load_config import _DEFAULT_LOAD_GROUP
    from sglang.srt.runtime_context import get_parallel

    group = load_config.load_group
    if group is _DEFAULT_LOAD_GROUP:
        group = get_parallel().world_group if torch.distributed.is_initialized() else None
    return Ranks(group.device_group, group.cpu_group) if group is not None and group.world_size > 1 else None


def elsewhere(model: torch.nn.Module) -> Callable[[str], bool]:
    """Return a function that says whether a tensor belongs to other ranks only.

    These are layers of other pipeline stages, and experts that SGLang places on other ranks.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.utils.common import PPMissingLayer

    modules = dict(model.named_modules())
    is_missing = inside_layers([name for name, it in modules.items() if isinstance(it, PPMissingLayer)], None)
    experts = {
        name: module
        for name, module in modules.items()
        if isinstance(module, FusedMoE) and not wants_all_experts(module)
    }
    locations = get_global_expert_location_metadata()

    @functools.cache
    def is_local(name: str, expert: int) -> bool:
        module = experts[name]
        copies = [expert]
        if locations is not None and module.uses_expert_location:
            if expert >= locations.num_logical_experts:
                return True
            copies = locations.logical_to_all_physical(module.layer_id, expert)
        return any(module._map_global_expert_id_to_local_expert_id(copy) != -1 for copy in copies)

    def is_elsewhere(name: str) -> bool:
        if is_missing(name):
            return True
        found = _EXPERT.match(name)
        return found is not None and found[1] in experts and not is_local(found[1], int(found[2]))

    return is_elsewhere


def wants_all_experts(module: torch.nn.Module) -> bool:
    """Return whether a rank needs the weights of all experts, as some kernels do."""
    return any(
        getattr(parameter, "_sglang_require_global_experts", False)
        for name, parameter in module.named_parameters()
        if name.endswith(("weight", "weight_packed"))
    )
