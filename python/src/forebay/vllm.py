"""Load format "forebay" of vLLM: `vllm serve MODEL --load-format forebay`.

vLLM finds it by the entry point group `vllm.general_plugins`. Options go into `--model-loader-extra-config`:

| option | meaning |
| --- | --- |
| `budget` | memory of the device that the load uses at once beside vLLM's parameters, such as "1GiB", the default |
| `share` | false makes each rank of a tensor-parallel group read all files. By default, they read each byte once |
| `enable_weights_track` | as for vLLM's own loader: whether parameters that no file has are an error |
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ._errors import OptionError
from ._weights import Ranks, inside_layers, options_of, read_with_bar

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig

__all__ = ["register"]

logger = logging.getLogger("forebay")

_OPTIONS = {"budget": object, "share": bool, "enable_weights_track": bool}


def register() -> None:
    """Add load format "forebay" to vLLM. vLLM calls this in each of its processes."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    if "forebay" not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader("forebay")(loader_class())


def loader_class() -> type:
    """Return the class of the loader. It is made here because vLLM is imported only if it is used."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

    class ForebayModelLoader(DefaultModelLoader):
        """vLLM's default loader, except that forebay reads the files."""

        def __init__(self, load_config: LoadConfig) -> None:
            self.options = options_of(load_config.model_loader_extra_config, _OPTIONS, "model_loader_extra_config")
            if load_config.safetensors_load_strategy not in (None, "lazy"):
                raise OptionError(
                    f"safetensors_load_strategy {load_config.safetensors_load_strategy!r} has no effect with load "
                    "format forebay: leave it away, or use --load-format safetensors"
                )
            track = {name: value for name, value in self.options.items() if name == "enable_weights_track"}
            # With "auto", vLLM finds the files of Mistral's own format, too.
            found = dataclasses.replace(load_config, load_format="auto", model_loader_extra_config=track)
            super().__init__(found)
            self.is_missing: Callable[[str], bool] = lambda name: False

        def get_all_weights(
            self, model_config: ModelConfig, model: torch.nn.Module
        ) -> Iterator[tuple[str, torch.Tensor]]:
            # vLLM calls this without load_weights when it reloads.
            if get_current_vllm_config_or_none() is not None:
                self._init_ep_weight_filter(model_config)
            self.is_missing = missing_layers(model)
            yield from super().get_all_weights(model_config, model)

        def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, torch.Tensor]]:
            if self.load_config.safetensors_load_strategy == "torchao":
                raise OptionError("load format forebay does not read checkpoints of torchao: use --load-format auto")
            files = self._files(source)
            if files is None:
                yield from super()._get_weights_iterator(source)
                return
            from vllm.model_executor.model_loader.weight_utils import enable_tqdm

            on_cpu: set[str] = set()

            def choose(names: list[str]) -> Iterator[bool]:
                on_cpu.update(self._kept_on_cpu(names))
                unused = {name for name in names if source.is_unused_weight and source.is_unused_weight(name)}
                # As vLLM does, all are read if the model would use none.
                left_out = on_cpu | (unused if len(unused) < len(names) else set())
                for name in names:
                    yield not (
                        name in left_out
                        or should_skip_weight(name, self.local_expert_ids)
                        or self.is_missing(source.prefix + name)
                    )

            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()
            for name, tensor in read_with_bar(
                files,
                device_of(self.load_config.device),
                enable_tqdm(self.load_config.use_tqdm_on_load),
                budget=self.options.get("budget", "1GiB"),
                ranks=tensor_parallel_ranks() if self.options.get("share", True) else None,
                choose=choose,
            ):
                yield source.prefix + name, tensor
                del tensor
            yield from mapped(files, on_cpu, source.prefix)

        def _files(self, source: DefaultModelLoader.Source) -> list[str] | None:
            """Return the safetensors files of a source. None means that the model asks for files of PyTorch.

            Raises OptionError if the checkpoint has no safetensors.
            """
            from vllm.model_executor.model_loader import weight_utils

            folder, files, is_safetensors, index = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            if not is_safetensors:
                if source.allow_patterns_overrides is not None:
                    logger.warning(
                        "vLLM reads %s: the model needs them, and they are no safetensors files", ", ".join(files)
                    )
                    return None
                raise OptionError(
                    f"{source.model_or_path} has no safetensors files, which load format forebay needs: "
                    "use --load-format auto"
                )
            if self._encoder_only_lm_prefixes is not None:
                files = weight_utils.filter_mm_encoder_only_safetensors_files(
                    files,
                    folder,
                    index,
                    self._encoder_only_lm_prefixes,
                    weights_mapper=self._encoder_only_weights_mapper,
                )
                if not files:
                    raise OptionError(
                        f"--mm-encoder-only leaves no weight files of {source.model_or_path}: all belong to the "
                        f"language model ({', '.join(self._encoder_only_lm_prefixes)})"
                    )
            return files

        def _kept_on_cpu(self, names: list[str]) -> Iterator[str]:
            """Yield tables that vLLM keeps in host memory. They may be larger than it can hold twice."""
            from vllm.model_executor.model_loader.weight_utils import _ENGRAM_WEIGHT_RE

            config = get_current_vllm_config_or_none()
            engram = getattr(config, "engram_config", None)
            if engram and engram.cpu_offload:
                yield from (name for name in names if _ENGRAM_WEIGHT_RE.search(name))

    return ForebayModelLoader


def mapped(files: list[str], names: set[str], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that stay in the files until their pages are used."""
    if not names:
        return
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                if name in names:
                    yield prefix + name, file.get_tensor(name)


def device_of(asked: str | None) -> str:
    """Return the device to read to: the GPU of this process, or "cpu" where there is no GPU of NVIDIA."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or (asked is not None and torch.device(asked).type != "cuda"):
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def tensor_parallel_ranks() -> Ranks | None:
    """Return the ranks that load the same layers at the same time, or None for one rank."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    group = parallel_state.get_tp_group()
    return Ranks(group.device_group, group.cpu_group) if group.world_size > 1 else None


def missing_layers(model: torch.nn.Module) -> Callable[[str], bool]:
    """Return a function that says whether a tensor belongs to a layer of another pipeline stage."""
    from vllm.model_executor.models.utils import get_pp_missing_layer_names

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return inside_layers(get_pp_missing_layer_names(model), None if mapper is None else mapper.map_name)
