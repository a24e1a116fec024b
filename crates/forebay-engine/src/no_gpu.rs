//! Replacement for the GPU module in a build without CUDA: there are no GPUs, and asking for one is an error.

use std::ops::ControlFlow;
use std::thread::Scope;
use std::time::Duration;

use forebay_format::{Catalog, TensorInfo};
use forebay_model::{Architecture, DeviceShare, KvCapacity, ModelError, SubLayerPlan, Weights};
use forebay_store::Interrupt;
use forebay_stream::MemoryPlan;

use crate::doctor::disk::Subject;
use crate::doctor::gpu::{GpuReport, none};
use crate::doctor::{ProfiledRead, ReadChoice};
use crate::gpu_error::GpuError;
use crate::load::{
    ChosenPlan, DeviceRequest, HeldWeights, HoldRequest, LoadError, LoadLimit, LoadRequest, Loaded,
    LoadedTensor, Sources,
};
use crate::placed::{Described, Placed};
use crate::plan::{PlanError, PlanRequest, PlannedModel};
use crate::{EngineError, SessionOptions};

/// Layout of a model on a GPU. It has no values, because there is no GPU.
pub(crate) enum GpuPlan {}

impl GpuPlan {
    pub fn sub_layers(&self) -> &SubLayerPlan {
        match *self {}
    }

    pub fn slots(&self) -> Option<&MemoryPlan> {
        match *self {}
    }
}

/// Device memory. It has no values, because there is no GPU.
pub(crate) enum Pool {}

impl Pool {
    pub fn bytes(&self) -> u64 {
        match *self {}
    }
}

/// A GPU and a ring of pinned memory. It has no values, because there is no GPU.
pub(crate) enum KeptRing {}

/// Properties of a GPU. It has no values, because there is no GPU.
#[derive(Clone, Copy)]
pub enum Facts {}

/// A GPU that stays open. It has no values, because there is no GPU.
pub enum OpenGpu {}

impl OpenGpu {
    pub fn open(_: &SessionOptions) -> Option<OpenGpu> {
        None
    }

    pub fn room_bytes(&self, _: Option<u64>) -> Result<u64, PlanError> {
        match *self {}
    }

    pub fn budget_bytes(&self, _: u64) -> Result<u64, PlanError> {
        match *self {}
    }
}

pub(crate) fn whole_bytes(
    _: &PlannedModel,
    gpu: &OpenGpu,
    _: &SessionOptions,
    _: KvCapacity,
) -> Result<u64, ModelError> {
    match *gpu {}
}

pub(crate) struct Opening;

impl Opening {
    pub fn start<'scope>(_: &'scope Scope<'scope, '_>, _: &SessionOptions) -> Opening {
        Opening
    }

    pub fn plan(
        self,
        _: &SessionOptions,
        _: &Architecture,
        _: &Weights,
        _context: usize,
        _: &Catalog,
        _: &mut Duration,
    ) -> Result<GpuPlan, PlanError> {
        Err(GpuError::NoCuda.into())
    }
}

impl Described<'_> {
    pub fn on_gpu(
        self,
        plan: GpuPlan,
        _: Duration,
        _: &SessionOptions,
        _: &mut dyn FnMut(u64, u64),
    ) -> Result<Placed, EngineError> {
        match plan {}
    }
}

pub(crate) fn is_unusable(error: &PlanError) -> bool {
    matches!(error, PlanError::Gpu(GpuError::NoCuda))
}

/// Returns the reason in words. The `false` means that the fall back to the CPU is not announced.
pub(crate) fn why_unusable(_: PlanError) -> (String, bool) {
    ("this build has no CUDA support".to_owned(), false)
}

pub(crate) fn estimate(_multiprocessors: u32, _total_bytes: u64) -> Option<Facts> {
    None
}

pub(crate) fn facts(_ordinal: usize) -> Option<Facts> {
    None
}

pub(crate) fn total_bytes(facts: &Facts) -> u64 {
    match *facts {}
}

pub(crate) fn none_in_profile() -> PlanError {
    GpuError::NoCuda.into()
}

pub(crate) fn share(
    _: &PlannedModel,
    facts: &Facts,
    _: &PlanRequest,
) -> Result<DeviceShare, ModelError> {
    match *facts {}
}

pub(crate) fn measure(_: &Subject, _: &ProfiledRead, _: &Interrupt) -> GpuReport {
    none(0, &why_unusable(GpuError::NoCuda.into()).0)
}

pub(crate) fn load(
    _: &Catalog,
    _: &Sources,
    _: DeviceRequest,
    _: &LoadRequest,
    _: &ReadChoice,
    _: &mut LoadLimit,
    _: &mut dyn FnMut(u64, u64),
) -> Result<Loaded, LoadError> {
    Err(GpuError::NoCuda.into())
}

pub(crate) fn hold(
    _: Catalog,
    _: &[TensorInfo],
    _: &Sources,
    _: &HoldRequest,
    _: DeviceRequest,
    _: &ReadChoice,
    _: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<HeldWeights, LoadError> {
    Err(GpuError::NoCuda.into())
}

pub(crate) fn hold_chosen(
    _: &ChosenPlan<'_>,
    _: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<LoadedTensor>, LoadError> {
    Err(GpuError::NoCuda.into())
}
