//! How a GPU and the host share a model that does not fit VRAM: decisions by sizes and rates, without a device.

mod help;
mod units;

use forebay_stream::MemoryPlan;

use crate::statistics::VramUse;

pub(crate) use help::Help;
pub use help::{HelpRates, HelpStatistics, HelpWanted, MissSplit};
pub(crate) use units::{ALIGNMENT, attention_of, feed_forward_of};
pub use units::{Unit, UnitCounts, UnitPlaces, UnitPlan, UnitRates};

/// What a GPU has room for.
#[derive(Debug, Clone)]
pub struct DeviceShare {
    /// Where the layers' dense weights are.
    pub units: UnitPlan,
    pub vram: VramUse,
    /// For experts, if not all fit.
    pub slots: Option<MemoryPlan>,
}
