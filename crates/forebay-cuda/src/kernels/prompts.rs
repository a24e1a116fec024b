//! Cuts passes of prompts into tiles, which blocks of threads of the prompt kernel take, and contexts into parts.

use std::cmp::Reverse;

use super::{CutPrompts, PromptRun, PromptTiles};

/// Number of query rows of a block of the prompt kernel, of all its heads together.
const ROWS: usize = 64;
/// Largest number of parts of the context of a prompt's row, and the least number of positions of one; the same as in the
/// prompt kernel.
pub(super) const PARTS: usize = 8;
const PART: usize = 256;
/// Threads of a block of the kernel that joins parts; the same as in the kernel.
pub(super) const JOIN_THREADS: u32 = 1024;
/// Passes of up to this many prompt rows have a block of threads for every part of a context. Others have enough tiles.
pub(super) const SPREAD_ROWS: usize = 128;

/// Returns the number of query heads that a block of the prompt kernel takes, of `group` heads that share a key/value head.
pub(super) fn heads_of_block(group: usize) -> usize {
    [4, 2].into_iter().find(|&heads| group.is_multiple_of(heads)).unwrap_or(1)
}

/// Cuts runs into tiles of up to `most` rows, of which every token has `heads`.
pub(super) fn tiles(
    most: usize,
    heads: usize,
    runs: impl Iterator<Item = PromptRun>,
) -> Vec<[u32; PromptTiles::WORDS]> {
    let of_run = |PromptRun { first, count, position, table }: PromptRun| {
        let end = count * heads;
        (0..end).step_by(most).map(move |from| {
            let rows = most.min(end - from);
            [first * heads + from, rows, position + from / heads, table].map(|word| word as u32)
        })
    };
    let mut tiles: Vec<_> = runs.flat_map(of_run).collect();
    tiles.sort_by_key(|[_, rows, position, _]| Reverse(position + rows / heads as u32));
    tiles
}

/// Returns true if every part of a context may have a block of threads in a pass with this many prompt rows.
pub(super) fn is_spread(rows: usize) -> bool {
    rows <= SPREAD_ROWS
}

/// Returns the number of positions of a part of the context of a row at `position`, and the first position behind it with
/// other parts. The prompt kernel computes the same.
fn part_length(position: usize) -> (usize, usize) {
    let capacity = (position + 1).next_power_of_two().max(PARTS * PART);
    (capacity / PARTS, capacity)
}

/// Cuts runs into tiles for blocks that take `of_block` heads. The contexts of a tile are cut alike. A pass of few rows has a
/// tile for every part.
pub(super) fn cut(runs: Vec<PromptRun>, of_block: usize) -> CutPrompts {
    let rows = runs.iter().map(|run| run.count).sum();
    let alike = runs.into_iter().flat_map(|run| {
        let end = run.position + run.count;
        let starts = std::iter::successors(Some(run.position), |&at| Some(part_length(at).1));
        starts.take_while(move |&position| position < end).map(move |position| {
            let first = run.first + position - run.position;
            let count = part_length(position).1.min(end) - position;
            PromptRun { first, count, position, ..run }
        })
    });
    let tiles = tiles(ROWS / of_block, 1, alike);
    let parts = |[_, rows, position, _]: [u32; PromptTiles::WORDS]| {
        let (length, _) = part_length(position as usize);
        (position + rows).div_ceil(length as u32)
    };
    if !is_spread(rows) || tiles.iter().all(|&tile| parts(tile) == 1) {
        return CutPrompts { tiles, in_parts: false };
    }
    let in_parts = tiles.into_iter().flat_map(|tile| {
        let [first, rows, position, table] = tile;
        (1..=parts(tile)).map(move |part| [first, rows | part << 8, position, table])
    });
    CutPrompts { tiles: in_parts.collect(), in_parts: true }
}

/// Returns the largest number of tiles of a pass with `rows` rows of `runs` runs, for blocks that take `of_block` heads.
pub(super) fn tiles_max(rows: usize, runs: usize, of_block: usize) -> usize {
    // Every run may end with a tile that is not full, and be cut where parts change: once, and again only if it is
    // as long as that position.
    let cuts = |rows: usize| rows.min(runs) + rows / (PARTS * PART);
    let whole = |rows: usize| rows.div_ceil(ROWS / of_block) + rows.min(runs) + cuts(rows);
    whole(rows).max(PARTS * whole(rows.min(SPREAD_ROWS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_cut_into_tiles_of_one_sequence() {
        let run = |first, count, position, table| PromptRun { first, count, position, table };
        let runs = || [run(0, 70, 0, 4), run(70, 3, 500, 2)].into_iter();
        assert_eq!(tiles(64, 1, runs()), [[70, 3, 500, 2], [64, 6, 64, 4], [0, 64, 0, 4]]);
        // Tiles of rows of heads begin and end inside of tokens.
        assert_eq!(
            tiles(64, 40, [run(2, 4, 7, 1)].into_iter()),
            [[208, 32, 10, 1], [144, 64, 8, 1], [80, 64, 7, 1]]
        );
        assert_eq!((tiles_max(73, 2, 1), tiles_max(5000, 2, 1)), (8 * 6, 79 + 2 + 4));
        assert_eq!((tiles_max(73, 2, 4), tiles_max(5000, 2, 4)), (8 * 9, 313 + 2 + 4));
        assert_eq!([1, 2, 3, 6, 8, 12].map(heads_of_block), [1, 2, 1, 2, 4, 4]);
    }

    #[test]
    fn tiles_of_prompts_do_not_cross_a_change_of_parts() {
        let run = |count, position| PromptRun { first: 5, count, position, table: 1 };
        let lengths = [0, 2047, 2048, 4095, 4096, 30_000].map(part_length);
        let (short, middle) = ((256, 2048), (512, 4096));
        assert_eq!(lengths, [short, short, middle, middle, (1024, 8192), (4096, 32_768)]);
        // A pass of many rows takes all parts of a context with one tile.
        let many = cut(vec![run(200, 2000)], 1);
        assert!(!many.in_parts);
        assert_eq!(
            many.tiles,
            [[181, 24, 2176, 1], [117, 64, 2112, 1], [53, 64, 2048, 1], [5, 48, 2000, 1]]
        );
        let few = cut(vec![run(20, 2040)], 1);
        let part = |first, rows, position, part: u32| [first, rows | part << 8, position, 1];
        let later = (1..=5).map(|of| part(13, 12, 2048, of));
        let expected: Vec<_> = later.chain((1..=8).map(|of| part(5, 8, 2040, of))).collect();
        assert_eq!(few, CutPrompts { tiles: expected, in_parts: true });
        // A single part needs no join.
        let short = cut(vec![run(100, 0), run(20, 236)], 1);
        assert_eq!(
            short,
            CutPrompts {
                tiles: vec![[5, 20, 236, 1], [69, 36, 64, 1], [5, 64, 0, 1]],
                in_parts: false
            }
        );
        for (rows, runs) in [(1, 1), (20, 1), (128, 128), (129, 1), (9000, 1)] {
            let each = rows / runs;
            for of_block in [1, 2, 4] {
                let tiles = cut((0..runs).map(|_| run(each, 2047)).collect(), of_block).tiles.len();
                let most = tiles_max(rows, runs, of_block);
                assert!(tiles <= most, "{tiles} of {most} tiles");
            }
        }
    }
}
