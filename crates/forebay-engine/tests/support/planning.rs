//! Shared parts of the planner tests: machine profiles, models without weights, and requests.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::path::Path;

use forebay_engine::doctor::{BesideCpu, MachineProfile};
use forebay_engine::plan::{
    HitCurve, PlanError, PlanRequest, Planned, PlannedModel, Planner, Rates, Work,
};
use forebay_engine::{CpuOffload, DeviceChoice, SessionOptions};
use forebay_lab::synth::{self, SynthOptions};

pub const GIB: u64 = 1 << 30;

pub fn profile(name: &str) -> MachineProfile {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/profiles").join(name);
    MachineProfile::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Returns a model of a real shape whose weights are never read.
pub fn model(arch: &str, layers: Option<u32>, quantisation: &str) -> PlannedModel {
    let quantisation = Some(quantisation.to_owned());
    model_of(arch, &SynthOptions { layers, quantisation, ..SynthOptions::default() })
}

pub fn model_of(arch: &str, options: &SynthOptions) -> PlannedModel {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    synth::hollow(arch, &path, options).unwrap();
    PlannedModel::open(&path).unwrap()
}

pub fn request(device: DeviceChoice, vram: Option<u64>, ram: u64, context: usize) -> PlanRequest {
    let options = SessionOptions {
        device,
        vram_bytes: vram,
        ram_bytes: Some(ram),
        ..SessionOptions::default()
    };
    PlanRequest::of_session(&options, context, Work::alone(512, 0))
}

/// Returns a request for the first GPU without CPU offload of experts.
pub fn gpu_alone(vram: u64, ram: u64, context: usize) -> PlanRequest {
    let request = request(DeviceChoice::Cuda(0), Some(vram), ram, context);
    PlanRequest { cpu_offload: CpuOffload::Never, ..request }
}

/// Returns the profile of the H200's host with the rates of bus and CPU at the same time, as `doctor` measured them on
/// 2026-11-22.
pub fn h200_together() -> MachineProfile {
    let mut profile = profile("h200.json");
    for kernel in profile.kernels.iter_mut().filter(|kernel| kernel.name.ends_with("_K")) {
        kernel.bytes_per_second = 118e9;
    }
    profile.gpu.as_mut().unwrap().beside_cpu =
        Some(BesideCpu { copy_bytes_per_second: 46.96e9, cpu_bytes_per_second: 87.36e9 });
    profile
}

pub fn plan(
    model: &PlannedModel,
    profile: &MachineProfile,
    request: &PlanRequest,
) -> Result<Planned, PlanError> {
    let rates = Rates::new(profile).unwrap();
    Planner::new(model, &rates, &HitCurve::default()).plan(request)
}
