//! Opens a GPU while a model's description is read, and plans the model for it.

use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use forebay_cuda::{CudaError, Gpu};
use forebay_format::Catalog;
use forebay_model::{Architecture, CudaPlan, Weights};
use forebay_options::{BadOption, OptionName};

use crate::plan::PlanError;
use crate::plan::{Coding, Rates, sub_layer_rates};
use crate::session::joined;
use crate::{CpuOffload, SessionOptions, device};

/// GPU that is being opened, if one is wanted.
pub(crate) struct Opening<'scope>(
    Option<ScopedJoinHandle<'scope, (Result<Gpu, CudaError>, Duration)>>,
);

impl<'scope> Opening<'scope> {
    pub fn start(scope: &'scope Scope<'scope, '_>, options: &SessionOptions) -> Opening<'scope> {
        let bound = options.gpu_wait_bound;
        Opening(device::wanted_gpu(options).map(|ordinal| {
            scope.spawn(move || {
                let started = Instant::now();
                let gpu = Gpu::open(ordinal).map(|gpu| match bound {
                    Some(bound) => gpu.with_host_wait_bound(bound),
                    None => gpu,
                });
                (gpu, started.elapsed())
            })
        }))
    }

    /// Waits for the GPU and stores the time that opening took in `open_time`.
    fn gpu(self, open_time: &mut Duration) -> Result<Gpu, CudaError> {
        let (gpu, time) = self.0.map(joined).ok_or(CudaError::NoGpu)?;
        *open_time = time;
        gpu
    }

    /// Plans how much of a model is in the GPU's memory, and what the CPU computes.
    ///
    /// # Errors
    /// Returns an error if the GPU cannot be used, if the model does not fit, or if an option would have no effect.
    pub fn plan(
        self,
        options: &SessionOptions,
        architecture: &Architecture,
        weights: &Weights,
        context: usize,
        catalog: &Catalog,
        open_time: &mut Duration,
    ) -> Result<CudaPlan, PlanError> {
        if options.cpu_offload == CpuOffload::Always && options.exact {
            return Err(PlanError::Option(BadOption {
                name: OptionName::CpuExperts,
                value: "given".into(),
                expected: format!(
                    "with {} the GPU computes everything: leave one of them out",
                    OptionName::Exact
                ),
            }));
        }
        let gpu = self.gpu(open_time)?;
        let capacity = options.kv_capacity(context)?;
        let shape = CudaPlan::cache(options.kv_type(), capacity);
        let (exact, vram) = (options.exact, options.vram_bytes);
        let plan = CudaPlan::new(gpu, architecture, weights, shape, exact, vram, options.policy)?;
        let plan = if options.cuda_graphs { plan } else { plan.without_graphs() };
        if options.cpu_offload == CpuOffload::Always && plan.slots().is_none() {
            return Err(PlanError::Option(BadOption {
                name: OptionName::CpuExperts,
                value: "given".into(),
                expected: "no experts are outside of the GPU's memory: leave it out".into(),
            }));
        }
        if plan.sub_layers().all_in_vram() {
            return Ok(plan);
        }
        let rates = options.sub_layer_rates.unwrap_or_else(|| {
            let rates = Rates::of_folder(&catalog.root).unwrap_or_else(Rates::usual_here);
            let rates = rates.reading(&Coding::of(catalog)).with_threads(options.threads);
            sub_layer_rates(architecture, weights, context, &rates, plan.sub_layers())
        });
        Ok(plan.share_with_cpu(&rates))
    }
}
