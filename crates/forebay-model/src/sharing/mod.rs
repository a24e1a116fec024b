//! How a GPU and the host share a model that does not fit VRAM: decisions by sizes and rates, without a device.

mod cpu_offload;
mod sub_layers;

use forebay_stream::MemoryPlan;

use crate::statistics::VramUse;

pub(crate) use cpu_offload::CpuOffloadControl;
pub use cpu_offload::{CpuOffloadMode, CpuOffloadRates, CpuOffloadStatistics, MissSplit};
pub(crate) use sub_layers::{ALIGNMENT, attention_of, feed_forward_of};
pub use sub_layers::{SubLayer, SubLayerCounts, SubLayerPlacement, SubLayerPlan, SubLayerRates};

/// What a GPU has room for.
#[derive(Debug, Clone)]
pub struct DeviceShare {
    /// Where the layers' dense weights are.
    pub sub_layers: SubLayerPlan,
    pub vram: VramUse,
    /// For experts, if not all fit.
    pub slots: Option<MemoryPlan>,
}
