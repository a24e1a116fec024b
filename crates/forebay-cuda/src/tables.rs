//! Tables of addresses in device memory, which kernels follow to weights.
//!
//! A wrong address in a table could make a kernel reach anything, so tables have memory of their own, which the host fills through
//! the checked functions here and which only kernels of this crate write. All addresses of one set of tables lead to one piece of
//! device memory, which the set keeps.

use std::sync::Arc;

use crate::launch::Launch;
use crate::{CudaError, DeviceMemory, DevicePtr, Gpu, HostWords};

/// An address as tables hold it; 0: none. The host never writes one by itself.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotAddress(u64);

/// Entries of one table of a set, and how many bytes each address has behind it at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSize {
    pub entries: usize,
    pub slot_bytes: u64,
}

/// Tables one behind the other, with addresses of one piece of memory.
pub struct AddressTables {
    // Freed before what its addresses lead to.
    memory: DeviceMemory,
    tables: Vec<AddressTable>,
    slots: Arc<DeviceMemory>,
}

/// One table. A copy does not keep it: its memory is looked for when a kernel is launched with it.
#[derive(Clone, Copy)]
pub struct AddressTable {
    first: DevicePtr<SlotAddress>,
    /// Its number in the set, of its first entry.
    number: usize,
    size: TableSize,
}

impl AddressTable {
    /// Entries.
    pub fn len(&self) -> usize {
        self.size.entries
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.size.entries == 0
    }

    /// Number of its first entry in all tables of its set.
    pub fn number(&self) -> usize {
        self.number
    }

    pub(crate) fn slot_bytes(&self) -> u64 {
        self.size.slot_bytes
    }

    pub(crate) fn first(&self) -> DevicePtr<SlotAddress> {
        self.first
    }
}

impl Gpu {
    /// Tables of `sizes`, all of whose entries are 0, for addresses of `slots`.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or whatever the driver says.
    pub fn address_tables(
        &self,
        slots: Arc<DeviceMemory>,
        sizes: &[TableSize],
    ) -> Result<AddressTables, CudaError> {
        let entries: usize = sizes.iter().map(|size| size.entries).sum();
        let memory = self.allocate(AddressTables::bytes(entries))?;
        self.fill(memory.ptr(), 0, memory.bytes())?;
        self.synchronize()?;
        let all: DevicePtr<SlotAddress> = memory.first();
        let mut number = 0;
        let table = |size: &TableSize| {
            let first = all.offset(number).first(size.entries);
            let table = AddressTable { first, number, size: *size };
            number += size.entries;
            table
        };
        let tables = sizes.iter().map(table).collect();
        Ok(AddressTables { memory, tables, slots })
    }

    /// Queues a copy of table `table`, whose entries are `addresses`, from words `at ..` of `staging`, which must stay as they are
    /// until it is done.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// As [`AddressTables::upload`], and when the words are beyond the end.
    pub fn queue_table(
        &self,
        tables: &AddressTables,
        table: usize,
        addresses: &[u64],
        staging: &mut TableStaging,
        at: usize,
    ) -> Result<(), CudaError> {
        let to = tables.checked(table, addresses);
        let words = 2 * addresses.len();
        staging.words.write(at, addresses);
        // SAFETY: every address that is copied was checked, and nothing else writes the words.
        let to = unsafe { to.cast_any::<u32>() };
        self.queue_upload(&staging.words, at..at + words, to)
    }

    /// Pinned memory for `words` words of tables on their way.
    ///
    /// # Errors
    /// Whatever the driver says: a limit on locked memory, above all.
    pub fn table_staging(&self, words: usize) -> Result<TableStaging, CudaError> {
        Ok(TableStaging { words: self.host_words(words)? })
    }
}

/// Pinned memory for tables on their way.
pub struct TableStaging {
    words: HostWords,
}

impl AddressTables {
    /// Bytes of device memory that tables of so many entries take.
    pub fn bytes(entries: usize) -> usize {
        (entries * size_of::<SlotAddress>()).max(1)
    }

    /// Table number `table`.
    ///
    /// # Panics
    /// When there is no such table.
    pub fn table(&self, table: usize) -> AddressTable {
        self.tables[table]
    }

    /// Makes `addresses` the first entries of table `table`, in stream order, and waits.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When there are more than entries, or one is neither 0 nor that of a whole slot of the tables' memory.
    pub fn upload(&self, gpu: &Gpu, table: usize, addresses: &[u64]) -> Result<(), CudaError> {
        let to = self.checked(table, addresses);
        // SAFETY: every address that is copied was checked.
        gpu.upload_to(addresses, unsafe { to.cast_any::<u64>() })
    }

    /// The entries of table `table`.
    ///
    /// # Errors
    /// What went wrong in queued work.
    pub fn download(&self, gpu: &Gpu, table: usize) -> Result<Vec<u64>, CudaError> {
        let table = self.table(table);
        // SAFETY: nothing is written there.
        gpu.download(unsafe { table.first.cast_any::<u64>() }, table.len())
    }

    /// Where table `table` begins, after the addresses for it were checked.
    fn checked(&self, table: usize, addresses: &[u64]) -> DevicePtr<SlotAddress> {
        let table = self.table(table);
        assert!(addresses.len() <= table.len(), "{} addresses of {}", addresses.len(), table.len());
        addresses.iter().for_each(|address| self.check(&table, *address));
        table.first
    }

    /// Makes sure that `address` may be an entry of `table`.
    pub(crate) fn check(&self, table: &AddressTable, address: u64) {
        let slots: DevicePtr<u8> = self.slots.ptr();
        let is_whole = |slot: DevicePtr<u8>| slot.len() as u64 >= table.size.slot_bytes;
        assert!(
            address == 0 || slots.at(address).is_some_and(is_whole),
            "an address that is not one of a slot"
        );
    }

    /// All entries.
    pub(crate) fn all(&self) -> DevicePtr<SlotAddress> {
        self.memory.first()
    }
}

impl Launch {
    /// The first `entries` entries of a table, whose addresses the kernel follows for `bytes` bytes at most.
    ///
    /// # Panics
    /// When there are fewer entries, or slots are smaller.
    pub(crate) fn table(self, table: AddressTable, entries: usize, bytes: u64) -> Launch {
        let slot_bytes = table.size.slot_bytes;
        assert!(bytes <= slot_bytes, "{bytes} bytes of slots of {slot_bytes}");
        self.ptr(table.first, entries)
    }
}
