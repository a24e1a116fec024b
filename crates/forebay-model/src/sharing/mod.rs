//! Sharing of a model between a GPU and the host when it does not fit VRAM. Decisions follow from sizes and rates,
//! without a device.

mod cpu_offload;
mod sub_layers;

use forebay_stream::MemoryPlan;

use crate::statistics::VramUse;

pub(crate) use cpu_offload::CpuOffloadControl;
pub use cpu_offload::{CpuOffloadMode, CpuOffloadRates, CpuOffloadStatistics, MissSplit};
pub(crate) use sub_layers::{ALIGNMENT, attention_of, feed_forward_of};
pub use sub_layers::{SubLayer, SubLayerCounts, SubLayerPlacement, SubLayerPlan, SubLayerRates};

/// The part of a model that a GPU has room for.
#[derive(Debug, Clone)]
pub struct DeviceShare {
    /// Locations of the layers' dense weights.
    pub sub_layers: SubLayerPlan,
    pub vram: VramUse,
    /// Slots for experts, if not all of them fit.
    pub slots: Option<MemoryPlan>,
    /// Most tokens of a prompt that go through the layers together.
    pub batch_tokens: usize,
}
