//! Model that recorded reads belong to.

use forebay_format::Catalog;
use forebay_store::EngineInfo;
use forebay_stream::ModelBlocks;

/// Description of the model that an I/O recording reads. A session or a load with a recorder keeps it.
#[derive(Clone, Debug)]
pub struct TracedModel {
    pub catalog: Catalog,
    /// Family of the architecture, empty if forebay does not know it.
    pub architecture: &'static str,
    /// The blocks that were read; `None` if reads were not made block by block.
    pub blocks: Option<ModelBlocks>,
    pub engine: EngineInfo,
}

impl TracedModel {
    pub(crate) fn new(
        catalog: &Catalog,
        architecture: &'static str,
        blocks: Option<&ModelBlocks>,
        engine: &EngineInfo,
    ) -> TracedModel {
        let (catalog, engine) = (catalog.clone(), engine.clone());
        TracedModel { catalog, architecture, blocks: blocks.cloned(), engine }
    }
}
