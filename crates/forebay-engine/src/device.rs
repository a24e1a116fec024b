//! Choice of the device that computes, with the reason for it.

use forebay_model::ModelError;
use forebay_options::{BadOption, OptionName};

use crate::gpu::{self, GpuPlan};
use crate::plan::PlanError;
use crate::{CpuOffload, KvCacheType, KvInVram, SessionOptions};

/// The device on which the user wants the model to be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU if it is usable and the model fits, otherwise the CPU.
    Auto,
    Cpu,
    /// The GPU with this index, counted from 0.
    Cuda(usize),
}

/// The chosen device.
pub(crate) struct Chosen {
    /// Plan of the model on the GPU that was chosen, or `None` for the CPU.
    pub cuda: Option<GpuPlan>,
    /// Name of the device: `cpu`, `cuda:N`, or `cuda:N and cpu`.
    pub name: String,
    /// Reason why a GPU that might have been used is not.
    pub why_not_cuda: Option<String>,
    /// True if forebay chose the device itself and the user should be told so. False where there is no driver, because
    /// then there was no choice to make.
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

/// Returns the GPU that [`choose`] will ask for, if it will ask for one. Opening a GPU takes a while, so the caller may
/// start it early.
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

/// Determines which device `options` ask for. `plan` opens the GPU of [`wanted_gpu`] and plans the model for it.
/// `dense` says that the model has no experts.
///
/// # Errors
/// Returns an error if a requested GPU cannot be used, if the model does not fit it, or if an option would have no
/// effect.
pub(crate) fn choose(
    options: &SessionOptions,
    dense: bool,
    plan: impl FnOnce() -> Result<GpuPlan, PlanError>,
) -> Result<Chosen, PlanError> {
    if options.exact && options.kv_cache != KvCacheType::F16 {
        return Err(PlanError::Option(BadOption {
            name: OptionName::KvType,
            value: options.kv_cache.name().into(),
            expected: format!(
                "{} keeps keys and values in f32: leave one of them out",
                OptionName::Exact
            ),
        }));
    }
    match options.device {
        DeviceChoice::Cpu => match options.gpu_option() {
            Some(name) => Err(PlanError::Option(BadOption {
                name,
                value: "given".into(),
                expected: format!(
                    "it is for a GPU, which {} does not use: leave one of them out",
                    OptionName::Device.with("cpu")
                ),
            })),
            None => Ok(Chosen::cpu(None)),
        },
        DeviceChoice::Cuda(ordinal) => on_gpu(options, ordinal, dense, plan),
        DeviceChoice::Auto => match (host_option(options), options.gpu_option()) {
            // Options for both devices: either the CPU computes experts for the GPU, or the options contradict each
            // other.
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
                    // A budget for memory that does not exist has no effect.
                    Some(name) => Err(without_gpu(name, error)),
                    None => {
                        let (why, announce) = gpu::why_unusable(error);
                        Ok(Chosen { announce, ..Chosen::cpu(Some(why)) })
                    }
                },
                // A budget of VRAM may turn out to be too small. The other options say how a GPU computes, so they
                // need one.
                Err(PlanError::Model(
                    error @ (ModelError::VramTooSmall { .. } | ModelError::NotOnGpu { .. }),
                )) if for_gpu.is_none_or(|name| name == OptionName::Vram) => {
                    Ok(Chosen::cpu(Some(error.to_string())))
                }
                Err(error) => Err(error),
            },
        },
    }
}

/// Explains that the option `name` needs a GPU, if `error` says that no GPU can be used. Returns other errors
/// unchanged.
fn without_gpu(name: OptionName, error: PlanError) -> PlanError {
    if !gpu::is_unusable(&error) {
        return error;
    }
    let why = gpu::why_unusable(error).0;
    PlanError::Option(BadOption {
        name,
        value: "given".into(),
        expected: format!("it is for a GPU, and none can be used: {why}: leave it out"),
    })
}

/// Chooses the requested GPU. Options for the CPU are accepted only if the CPU takes part: in experts, or in layers of
/// a `dense` model.
fn on_gpu(
    options: &SessionOptions,
    ordinal: usize,
    dense: bool,
    plan: impl FnOnce() -> Result<GpuPlan, PlanError>,
) -> Result<Chosen, PlanError> {
    let refused = |name, why: &str| {
        let expected = format!("{why}: leave it out, or use {}", OptionName::Device.with("cpu"));
        Err(PlanError::Option(BadOption { name, value: "given".into(), expected }))
    };
    match host_option(options) {
        None => Ok(Chosen::cuda(plan()?, ordinal)),
        Some(OptionName::Threads)
            if dense || options.cpu_offload_possible() != CpuOffload::Never =>
        {
            let plan = plan()?;
            match plan.slots().is_some() || plan.sub_layers().cpu_takes_part() {
                true => Ok(Chosen::cuda(plan, ordinal)),
                false => refused(OptionName::Threads, "the GPU computes the whole model"),
            }
        }
        Some(name) => refused(name, "it is for the CPU, and a GPU computes"),
    }
}

/// Returns an option that is given and only has an effect where the CPU computes. The budget of RAM and the policy are not among
/// them: they bound and manage the part of a model that is kept in host memory, which on a GPU is the part that VRAM
/// has no room for.
fn host_option(options: &SessionOptions) -> Option<OptionName> {
    let given = [
        (OptionName::Prefetch, options.prefetch),
        (OptionName::Threads, options.threads.is_some()),
    ];
    given.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
}

impl SessionOptions {
    /// Returns the name of an option that is given and only has an effect on a GPU.
    pub fn gpu_option(&self) -> Option<OptionName> {
        let given = [
            (OptionName::NoCudaGraph, !self.cuda_graphs),
            (OptionName::CpuExperts, self.cpu_offload == CpuOffload::Always),
            (OptionName::NoCpuExperts, self.cpu_offload == CpuOffload::Never),
            (OptionName::KvVram, self.kv_in_vram != KvInVram::default()),
            (OptionName::Vram, self.vram_bytes.is_some()),
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
        assert_eq!(host_option(&threads), Some(OptionName::Threads));
        let ram = SessionOptions { ram_bytes: Some(1), ..SessionOptions::default() };
        assert_eq!((host_option(&ram), ram.gpu_option()), (None, None), "it bounds either");
        let cuda = SessionOptions { device: DeviceChoice::Cuda(3), ..SessionOptions::default() };
        assert_eq!((wanted_gpu(&cuda), wanted_gpu(&SessionOptions::default())), (Some(3), None));
        let both = SessionOptions { device: DeviceChoice::Auto, ..threads };
        assert_eq!(wanted_gpu(&both), None, "none is opened in vain");
        let both = SessionOptions { vram_bytes: Some(1), ..both };
        assert_eq!(wanted_gpu(&both), Some(0), "the CPU may compute experts");
        let graphs = SessionOptions { cuda_graphs: false, ..SessionOptions::default() };
        assert_eq!(
            (host_option(&graphs), graphs.gpu_option()),
            (None, Some(OptionName::NoCudaGraph))
        );
        let cache = SessionOptions { kv_cache: KvCacheType::Q8_0, ..SessionOptions::default() };
        assert_eq!((host_option(&cache), cache.gpu_option()), (None, None), "both have it");
        let prefetch = SessionOptions { prefetch: true, ..SessionOptions::default() };
        assert_eq!(host_option(&prefetch), Some(OptionName::Prefetch));
    }

    #[test]
    fn only_a_session_for_one_sequence_chooses_cpu_offload_by_misses() {
        let possible = |sequences, for_engine, cpu_offload| {
            let options = SessionOptions::default();
            SessionOptions { sequences, for_engine, cpu_offload, ..options }.cpu_offload_possible()
        };
        assert_eq!(possible(1, false, CpuOffload::Auto), CpuOffload::Auto);
        assert_eq!(possible(2, false, CpuOffload::Auto), CpuOffload::Never);
        assert_eq!(possible(1, true, CpuOffload::Auto), CpuOffload::Never);
        assert_eq!(possible(2, true, CpuOffload::Always), CpuOffload::Always);
    }
}
