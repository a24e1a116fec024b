//! Tables of addresses in device memory, which kernels follow to weights.
//!
//! A wrong address in a table could make a kernel reach any memory. Tables therefore have memory of their own. The
//! host fills it through the checked functions here, and only kernels of this crate write it. All addresses of one set
//! of tables point into one piece of device memory, which the set keeps alive.

use std::sync::Arc;

use crate::launch::Launch;
use crate::{CudaError, DeviceMemory, DevicePtr, Gpu, HostWords};

/// An address as tables hold it; 0 means none. The host never writes one directly.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotAddress(u64);

/// Size of one table of a set: its number of entries, and the least number of bytes behind each address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSize {
    pub entries: usize,
    pub slot_bytes: u64,
}

/// A set of consecutive tables, with addresses into one piece of memory.
pub struct AddressTables {
    // Declared first, so that it is freed before the memory that its addresses point to.
    memory: DeviceMemory,
    tables: Vec<AddressTable>,
    slots: Arc<DeviceMemory>,
}

/// One table. A copy does not keep the table's memory alive, so each launch that uses it checks that the memory
/// exists.
#[derive(Clone, Copy)]
pub struct AddressTable {
    first: DevicePtr<SlotAddress>,
    /// Index of its first entry among all entries of the set.
    number: usize,
    size: TableSize,
}

impl AddressTable {
    /// Checks that a kernel reaches at most the first `bytes` bytes of a slot.
    ///
    /// # Panics
    /// Panics if slots are smaller.
    pub(crate) fn check(self, bytes: u64) {
        let slot_bytes = self.size.slot_bytes;
        assert!(bytes <= slot_bytes, "{bytes} bytes of slots of {slot_bytes}");
    }

    /// Returns the device address of the first entry.
    pub(crate) fn address(self) -> u64 {
        self.first.address()
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.size.entries
    }

    /// Returns true if the table has no entries.
    pub fn is_empty(&self) -> bool {
        self.size.entries == 0
    }

    /// Returns the index of its first entry among all entries of its set.
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
    /// Allocates tables of `sizes` for addresses of `slots`. All entries are 0.
    ///
    /// # Errors
    /// Returns [`CudaError::OutOfMemory`], or another error if a driver call fails.
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

    /// Queues a copy of `addresses` to the first entries of table `table`, through the words of `staging` from `at`
    /// on. These words must not change until the copy is done.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics in the cases of [`AddressTables::upload`], and if the words are beyond the end.
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
        // SAFETY: every copied address was checked, and nothing else writes the words.
        let to = unsafe { to.cast_any::<u32>() };
        self.queue_upload(&staging.words, at..at + words, to)
    }

    /// Allocates pinned memory for `words` words of tables that are copied to the GPU.
    ///
    /// # Errors
    /// Returns an error if a driver call fails, most often because of a limit on locked memory.
    pub fn table_staging(&self, words: usize) -> Result<TableStaging, CudaError> {
        Ok(TableStaging { words: self.host_words(words)? })
    }
}

/// Pinned memory for tables that are copied to the GPU.
pub struct TableStaging {
    words: HostWords,
}

impl AddressTables {
    /// Returns the bytes of device memory that tables of `entries` entries take.
    pub fn bytes(entries: usize) -> usize {
        (entries * size_of::<SlotAddress>()).max(1)
    }

    /// Returns table number `table`.
    ///
    /// # Panics
    /// Panics if there is no such table.
    pub fn table(&self, table: usize) -> AddressTable {
        self.tables[table]
    }

    /// Copies `addresses` to the first entries of table `table`, in stream order, and waits.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if there are more addresses than entries, or if one is neither 0 nor that of a whole slot of the tables'
    /// memory.
    pub fn upload(&self, gpu: &Gpu, table: usize, addresses: &[u64]) -> Result<(), CudaError> {
        let to = self.checked(table, addresses);
        // SAFETY: every copied address was checked.
        gpu.upload_to(addresses, unsafe { to.cast_any::<u64>() })
    }

    /// Copies the entries of table `table` from the device.
    ///
    /// # Errors
    /// Returns the error of queued work that failed.
    pub fn download(&self, gpu: &Gpu, table: usize) -> Result<Vec<u64>, CudaError> {
        let table = self.table(table);
        // SAFETY: the host only reads through this address.
        gpu.download(unsafe { table.first.cast_any::<u64>() }, table.len())
    }

    /// Checks `addresses` and returns the address of the first entry of table `table`.
    fn checked(&self, table: usize, addresses: &[u64]) -> DevicePtr<SlotAddress> {
        let table = self.table(table);
        assert!(addresses.len() <= table.len(), "{} addresses of {}", addresses.len(), table.len());
        addresses.iter().for_each(|address| self.check(&table, *address));
        table.first
    }

    /// Checks that `address` may be an entry of `table`.
    pub(crate) fn check(&self, table: &AddressTable, address: u64) {
        let slots: DevicePtr<u8> = self.slots.ptr();
        let is_whole = |slot: DevicePtr<u8>| slot.len() as u64 >= table.size.slot_bytes;
        assert!(
            address == 0 || slots.at(address).is_some_and(is_whole),
            "an address that is not one of a slot"
        );
    }

    /// Returns the address of the first entry of all tables.
    pub(crate) fn all(&self) -> DevicePtr<SlotAddress> {
        self.memory.first()
    }
}

impl Launch {
    /// Passes the first `entries` entries of a table, whose addresses the kernel follows for at most `bytes` bytes.
    ///
    /// # Panics
    /// Panics if there are fewer entries, or if slots are smaller.
    pub(crate) fn table(self, table: AddressTable, entries: usize, bytes: u64) -> Launch {
        table.check(bytes);
        self.ptr(table.first, entries)
    }
}
