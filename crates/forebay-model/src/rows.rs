//! Rows of tables on the disk that are larger than any memory: a token needs a few rows of a few hundred bytes out of tens of
//! gigabytes.
//!
//! All reads of a batch begin at once ([`RowReader::ask`]), so a batch waits for the disk about as long as one row would. Rows that
//! are used often stay in a cache of rows. The page cache would keep 4 KiB for each.

use forebay_format::Extent;
use forebay_store::{FileSet, StoreError};

/// Most bytes of cached rows of one table.
const CACHE_BYTES: usize = 32 << 20;
/// Places of a cache to which a row may go.
const WAYS: usize = 8;

/// A table that consists of parts with as many rows each. The last part may have fewer.
#[derive(Debug, Clone)]
pub struct RowTable {
    pub parts: Vec<Extent>,
    pub rows_per_part: usize,
    pub row_bytes: usize,
}

impl RowTable {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.length as usize / self.row_bytes).sum()
    }

    /// Returns the place of a row in the files.
    ///
    /// # Panics
    /// Panics if there is no such row.
    fn extent(&self, row: u32) -> Extent {
        let (part, row) = (row as usize / self.rows_per_part, row as usize % self.rows_per_part);
        let bytes = self.row_bytes as u64;
        self.parts[part].slice(row as u64 * bytes, bytes).expect("rows are checked")
    }

    /// Returns the bytes of a [`RowReader`] of this table.
    pub fn cache_bytes(&self) -> u64 {
        let (sets, slot) = (self.sets(), self.row_bytes + size_of::<Entry>());
        (sets * WAYS * slot) as u64
    }

    /// Returns the number of sets of a cache: all rows, or as many as fit.
    fn sets(&self) -> usize {
        (CACHE_BYTES / self.row_bytes.max(1)).min(self.rows()).div_ceil(WAYS)
    }
}

/// Reads rows of one table.
#[derive(Debug)]
pub struct RowReader {
    table: RowTable,
    files: FileSet,
    cache: Cache,
    /// Number of rows that were read from the files.
    read: u64,
}

impl RowReader {
    pub fn new(table: &RowTable, files: &FileSet) -> RowReader {
        RowReader { cache: Cache::new(table), table: table.clone(), files: files.clone(), read: 0 }
    }

    /// Returns the bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.table.row_bytes
    }

    /// Asks for rows that are not in the cache, and does not wait for them.
    pub fn ask(&mut self, rows: &[u32]) {
        for row in rows {
            if !self.cache.has(*row) {
                self.files.read_ahead(self.table.extent(*row));
            }
        }
    }

    /// Writes the rows to `out`, one after another, as they are in the files.
    ///
    /// # Errors
    /// Returns an error if a read fails.
    ///
    /// # Panics
    /// Panics if `out` is not as long as the rows, or the table lacks one.
    pub fn read(&mut self, rows: &[u32], out: &mut [u8]) -> Result<(), StoreError> {
        let bytes = self.table.row_bytes;
        assert_eq!(out.len(), rows.len() * bytes, "{} rows", rows.len());
        for (row, out) in rows.iter().zip(out.chunks_exact_mut(bytes)) {
            if !self.cache.copy(*row, out) {
                self.files.read_exact(self.table.extent(*row), out)?;
                self.read += 1;
                self.cache.insert(*row, out);
            }
        }
        Ok(())
    }
}

/// A row in the cache.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// The row's number plus 1; 0 means none.
    tag: u32,
    /// Place of its bytes.
    place: u32,
}

/// Rows in sets of [`WAYS`], each sorted by use: a row that is used moves one place to the front, and a new row replaces the last. So
/// rows that are used often stay, whatever passes by.
#[derive(Debug)]
struct Cache {
    entries: Vec<Entry>,
    bytes: Vec<u8>,
    row_bytes: usize,
}

impl Cache {
    fn new(table: &RowTable) -> Cache {
        let places = table.sets() * WAYS;
        Cache {
            entries: (0..places).map(|place| Entry { tag: 0, place: place as u32 }).collect(),
            bytes: vec![0; places * table.row_bytes],
            row_bytes: table.row_bytes,
        }
    }

    fn set(&mut self, row: u32) -> &mut [Entry] {
        // Fibonacci hashing (Knuth, volume 3, section 6.4). Neighbouring rows go to different sets.
        let hash = u64::from(row).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let sets = self.entries.len() / WAYS;
        let set = ((hash * sets as u64) >> 32) as usize;
        &mut self.entries[set * WAYS..][..WAYS]
    }

    fn row(&self, place: u32) -> std::ops::Range<usize> {
        let first = place as usize * self.row_bytes;
        first..first + self.row_bytes
    }

    fn has(&mut self, row: u32) -> bool {
        self.set(row).iter().any(|entry| entry.tag == row + 1)
    }

    /// Copies a row to `out`. Returns false if it is not there.
    fn copy(&mut self, row: u32, out: &mut [u8]) -> bool {
        let set = self.set(row);
        let Some(way) = set.iter().position(|entry| entry.tag == row + 1) else { return false };
        let place = set[way].place;
        set.swap(way, way.saturating_sub(1));
        out.copy_from_slice(&self.bytes[self.row(place)]);
        true
    }

    fn insert(&mut self, row: u32, content: &[u8]) {
        let last = &mut self.set(row)[WAYS - 1];
        last.tag = row + 1;
        let place = last.place;
        let place = self.row(place);
        self.bytes[place].copy_from_slice(content);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_format::FileIndex;

    /// Returns a table in two parts, whose row `n` has the bytes of `n`, and its file.
    fn table(rows: u32) -> (RowTable, FileSet) {
        let bytes: Vec<u8> =
            (0..rows).flat_map(|row| [row.to_le_bytes(), (!row).to_le_bytes()].concat()).collect();
        let half = u64::from(rows.div_ceil(2)) * 8;
        let part = |offset, length| Extent { file: FileIndex(0), offset, length };
        let parts = vec![part(0, half), part(half, bytes.len() as u64 - half)];
        let table = RowTable { parts, rows_per_part: half as usize / 8, row_bytes: 8 };
        (table, FileSet::in_memory(vec![bytes]))
    }

    fn expect(rows: &[u32], out: &[u8]) {
        for (row, out) in rows.iter().zip(out.chunks_exact(8)) {
            assert_eq!(out, [row.to_le_bytes(), (!row).to_le_bytes()].concat());
        }
    }

    #[test]
    fn rows_of_all_parts_come_from_the_file_once() {
        let (table, files) = table(1001);
        assert_eq!(table.rows(), 1001);
        let mut reader = RowReader::new(&table, &files);
        let rows: Vec<u32> = [0, 500, 501, 1000, 1000, 500].into();
        let mut out = vec![0; 8 * rows.len()];
        for _ in 0..3 {
            out.fill(0);
            reader.ask(&rows);
            reader.read(&rows, &mut out).unwrap();
            expect(&rows, &out);
        }
        assert_eq!(reader.read, 4);
    }

    #[test]
    fn rows_that_are_used_often_stay_in_a_full_cache() {
        let (mut table, files) = table(4000);
        // As if rows were larger: the cache has room for 64 of them.
        let mut reader = RowReader::new(&table, &files);
        table.parts.truncate(1);
        table.parts[0].length = 64 * 8;
        reader.cache = Cache::new(&table);
        let mut out = vec![0; 8 * 5];
        for step in 0..500 {
            let rows = [7, 2001, 1000 + step, 7, 2001];
            reader.read(&rows, &mut out).unwrap();
            expect(&rows, &out);
        }
        let read = reader.read;
        assert!((500..520).contains(&read), "{read} rows of 500 new ones and two old ones");
    }

    #[test]
    fn a_file_that_ends_is_an_error() {
        let (table, _) = table(100);
        let mut reader = RowReader::new(&table, &FileSet::in_memory(vec![vec![1; 40]]));
        let mut out = [0; 16];
        assert!(reader.read(&[1, 99], &mut out).is_err());
        assert!(reader.read(&[1, 2], &mut out).is_ok());
    }
}
