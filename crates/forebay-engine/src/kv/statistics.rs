//! Statistics of the block manager.

/// Blocks of one layer group. `total` is the sum of `free`, `cached` and `referenced`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupStatistics {
    /// Blocks in the pool without the null block.
    pub total: usize,
    /// Blocks without content.
    pub free: usize,
    /// Blocks with content that no sequence references. They are evicted when blocks are needed.
    pub cached: usize,
    /// Blocks that sequences reference, each counted once.
    pub referenced: usize,
    /// Cached blocks that were given out for other content since the start. Blocks that became free because another group
    /// evicted their counterparts are not counted.
    pub evictions_total: u64,
}

/// Rows of admitted sequences since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvStatistics {
    /// Rows of all sequences when they were admitted.
    pub rows_total: u64,
    /// Those of them whose keys and values were already in the pools.
    pub hit_rows_total: u64,
}
