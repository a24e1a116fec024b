//! Which device computes, and why.

use forebay_model::ModelError;

use crate::gpu::{self, GpuPlan};
use crate::{CpuOffload, EngineError, KvCacheType, SessionOptions};

/// Where a user wants a model to be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU, if it is usable and the model fits; else the CPU.
    Auto,
    Cpu,
    /// This GPU, counted from 0.
    Cuda(usize),
}

/// What was chosen.
pub(crate) struct Chosen {
    /// The GPU with room for the model; `None` for the CPU.
    pub cuda: Option<GpuPlan>,
    /// `cpu`, `cuda:N`, or `cuda:N and cpu`.
    pub name: String,
    /// Why a GPU that might have been used is not.
    pub why_not_cuda: Option<String>,
    /// Whether the choice was ours and is worth a line: not where there is no driver, so that there was none.
    pub announce: bool,
}

impl Chosen {
    fn cpu(why_not_cuda: Option<String>) -> Chosen {
        let announce = why_not_cuda.is_some();
        Chosen { cuda: None, name: "cpu".into(), why_not_cuda, announce }
    }

    fn cuda(plan: GpuPlan, ordinal: usize) -> Chosen {
        let too = if plan.sub_layers().cpu_takes_part() { " and cpu" } else { "" };
        let name = format!("cuda:{ordinal}{too}");
        Chosen { cuda: Some(plan), name, why_not_cuda: None, announce: false }
    }
}

/// The GPU that [`choose`] will ask for, if it will: opening it takes a while and may begin before.
pub(crate) fn wanted_gpu(options: &SessionOptions) -> Option<usize> {
    match options.device {
        DeviceChoice::Cpu => None,
        DeviceChoice::Auto if host_option(options).is_some() && options.gpu_option().is_none() => {
            None
        }
        DeviceChoice::Auto => Some(0),
        DeviceChoice::Cuda(ordinal) => Some(ordinal),
    }
}

/// Finds out which device `options` mean; `plan` opens the GPU of [`wanted_gpu`] and plans the model for it. `dense`: the model has no experts.
///
/// # Errors
/// A GPU that was asked for and cannot be used, a model that does not fit it, and options that would have no effect.
pub(crate) fn choose(
    options: &SessionOptions,
    dense: bool,
    plan: impl FnOnce() -> Result<GpuPlan, EngineError>,
) -> Result<Chosen, EngineError> {
    if options.exact && options.kv_cache != KvCacheType::F16 {
        return Err(EngineError::BadOption {
            name: "--kv-type",
            value: options.kv_cache.name().into(),
            expected: "--exact keeps keys and values in f32: leave one of them out".into(),
        });
    }
    match options.device {
        DeviceChoice::Cpu => match options.gpu_option() {
            Some(name) => Err(EngineError::BadOption {
                name,
                value: "given".into(),
                expected: "it is for a GPU, which --device cpu does not use: leave one of them out"
                    .into(),
            }),
            None => Ok(Chosen::cpu(None)),
        },
        DeviceChoice::Cuda(ordinal) => on_gpu(options, ordinal, dense, plan),
        DeviceChoice::Auto => match (host_option(options), options.gpu_option()) {
            // Options for both: the CPU helps the GPU, or they contradict each other.
            (Some(_), Some(name)) => {
                on_gpu(options, 0, dense, plan).map_err(|error| without_gpu(name, error))
            }
            (Some(name), None) => {
                let why = Some(format!("{name} is for the CPU"));
                Ok(Chosen { announce: false, ..Chosen::cpu(why) })
            }
            (None, for_gpu) => match plan() {
                Ok(plan) => Ok(Chosen { announce: true, ..Chosen::cuda(plan, 0) }),
                Err(error) if gpu::is_unusable(&error) => match for_gpu {
                    // A budget for memory that is not there has no effect.
                    Some(name) => Err(without_gpu(name, error)),
                    None => {
                        let (why, announce) = gpu::why_unusable(error);
                        Ok(Chosen { announce, ..Chosen::cpu(Some(why)) })
                    }
                },
                // A budget may turn out to be too small; the other options say how a GPU computes.
                Err(EngineError::Model(
                    error @ (ModelError::VramTooSmall { .. } | ModelError::NotOnGpu { .. }),
                )) if for_gpu.is_none_or(|name| name == "--vram") => {
                    Ok(Chosen::cpu(Some(error.to_string())))
                }
                Err(error) => Err(error),
            },
        },
    }
}

/// The option `name` is for a GPU, and `error` may say that there is none.
fn without_gpu(name: &'static str, error: EngineError) -> EngineError {
    if !gpu::is_unusable(&error) {
        return error;
    }
    let why = gpu::why_unusable(error).0;
    EngineError::BadOption {
        name,
        value: "given".into(),
        expected: format!("it is for a GPU, and none can be used: {why}: leave it out"),
    }
}

/// The GPU that was asked for, with options for the CPU only if that takes part: in experts, or in layers of a `dense` model.
fn on_gpu(
    options: &SessionOptions,
    ordinal: usize,
    dense: bool,
    plan: impl FnOnce() -> Result<GpuPlan, EngineError>,
) -> Result<Chosen, EngineError> {
    let refused = |name, expected: &str| {
        Err(EngineError::BadOption { name, value: "given".into(), expected: expected.into() })
    };
    match host_option(options) {
        None => Ok(Chosen::cuda(plan()?, ordinal)),
        Some("--threads") if dense || options.cpu_offload_possible() != CpuOffload::Never => {
            let plan = plan()?;
            match plan.slots().is_some() || plan.sub_layers().cpu_takes_part() {
                true => Ok(Chosen::cuda(plan, ordinal)),
                false => refused(
                    "--threads",
                    "the GPU computes the whole model: leave it out, or use --device cpu",
                ),
            }
        }
        Some(name) => refused(
            name,
            "it is for the CPU, and a GPU computes: leave it out, or use --device cpu",
        ),
    }
}

/// An option that is given and only means something where the CPU computes. `--ram` and `--policy` do not: they bound and
/// rule what of a model stays in host memory, on a GPU what it has no room for.
fn host_option(options: &SessionOptions) -> Option<&'static str> {
    let given = [("--prefetch", options.prefetch), ("--threads", options.threads.is_some())];
    given.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
}

impl SessionOptions {
    /// An option that is given and only means something on a GPU.
    pub fn gpu_option(&self) -> Option<&'static str> {
        let given = [
            ("--no-cuda-graph", !self.cuda_graphs),
            ("--cpu-experts", self.cpu_offload == CpuOffload::Always),
            ("--no-cpu-experts", self.cpu_offload == CpuOffload::Never),
            ("--vram", self.vram_bytes.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_for_the_host_are_seen() {
        assert_eq!(host_option(&SessionOptions::default()), None);
        let threads = SessionOptions { threads: Some(1), ..SessionOptions::default() };
        assert_eq!(host_option(&threads), Some("--threads"));
        let ram = SessionOptions { ram_bytes: Some(1), ..SessionOptions::default() };
        assert_eq!((host_option(&ram), ram.gpu_option()), (None, None), "it bounds either");
        let cuda = SessionOptions { device: DeviceChoice::Cuda(3), ..SessionOptions::default() };
        assert_eq!((wanted_gpu(&cuda), wanted_gpu(&SessionOptions::default())), (Some(3), None));
        let both = SessionOptions { device: DeviceChoice::Auto, ..threads };
        assert_eq!(wanted_gpu(&both), None, "none is opened in vain");
        let both = SessionOptions { vram_bytes: Some(1), ..both };
        assert_eq!(wanted_gpu(&both), Some(0), "the CPU may compute experts");
        let graphs = SessionOptions { cuda_graphs: false, ..SessionOptions::default() };
        assert_eq!((host_option(&graphs), graphs.gpu_option()), (None, Some("--no-cuda-graph")));
        let cache = SessionOptions { kv_cache: KvCacheType::Q8_0, ..SessionOptions::default() };
        assert_eq!((host_option(&cache), cache.gpu_option()), (None, None), "both have it");
        let prefetch = SessionOptions { prefetch: true, ..SessionOptions::default() };
        assert_eq!(host_option(&prefetch), Some("--prefetch"));
    }
}
