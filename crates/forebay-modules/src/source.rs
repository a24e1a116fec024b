//! Where weights are outside of the device.

use crate::device::DeviceError;
use crate::room::Group;

/// Bytes of a group outside of the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outside {
    /// Bytes that are brought.
    pub bytes: u64,
    /// Bytes that are read before.
    pub read_bytes: u64,
}

/// Weights outside of the device: in RAM, or in files, from which they are read ahead of their use.
pub trait WeightSource<W>: Send + Sync + 'static {
    /// Returns the weights of a group, which may be on their way from the disk.
    ///
    /// # Errors
    /// Returns an error if they cannot be read.
    fn take(&self, group: Group) -> Result<W, DeviceError>;

    /// Returns for how many groups ahead [`WeightSource::expect`] wants to know them.
    fn expects_max(&self) -> usize {
        0
    }

    /// Tells which groups will be taken, the next one first.
    fn expect(&self, groups: &[Group]) {
        let _ = groups;
    }

    /// Tells which groups are taken in each pass, in the order of their first use, because they do not stay in the device.
    fn plan(&self, groups: &[Group]) {
        let _ = groups;
    }

    /// Returns the cost of bringing each of these groups, if there are so many more bytes of RAM. Without any that are read, the rate of the
    /// disk is not needed.
    fn outside(&self, groups: &[Group], more_ram: u64) -> Vec<Outside> {
        let _ = more_ram;
        vec![Outside::default(); groups.len()]
    }

    /// Returns how many bytes a group takes at most where it stays coded, as it is brought. `None` if that is not known before it is brought.
    fn coded_bytes(&self, group: Group) -> Option<u64> {
        let _ = group;
        None
    }

    /// Returns bytes that the disk reads in a second, if anything was read yet.
    fn read_bytes_per_second(&self) -> Option<f64> {
        None
    }

    /// Returns the bytes of buffers for reads.
    fn buffer_bytes(&self) -> u64 {
        0
    }

    /// Stops reading. What is taken from now on may fail.
    fn close(&self) {}
}
