//! Information from the system about the driver and about the GPU's connection.

use cudarc::driver::sys;

use crate::{CudaError, Gpu};

/// PCIe link of a GPU, as reported by the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcieLink {
    /// PCI address as `domain:bus:device.function`.
    pub address: String,
    /// Highest speed of each lane, such as `32.0 GT/s PCIe`.
    pub speed: String,
    pub lanes: String,
}

impl Gpu {
    /// Returns the version of the driver's kernel module, such as `570.86.15`, or `None` if the system does not show
    /// it.
    pub fn driver_version() -> Option<String> {
        version_in(&std::fs::read_to_string("/proc/driver/nvidia/version").ok()?)
    }

    /// Returns the GPU's link, or `None` if the system does not show it, as in some virtual machines.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn pcie(&self) -> Result<Option<PcieLink>, CudaError> {
        let mut address = [0_u8; 32];
        let device = self.shared_context().cu_device();
        // SAFETY: the driver writes at most the given number of bytes, the last one zero.
        unsafe { sys::cuDeviceGetPCIBusId(address.as_mut_ptr().cast(), 32, device) }
            .result()
            .map_err(CudaError::of("asking for the GPU's address"))?;
        let end = address.iter().position(|&byte| byte == 0).unwrap_or(address.len());
        let address = String::from_utf8_lossy(&address[..end]).to_lowercase();
        let read = |name| {
            let path = format!("/sys/bus/pci/devices/{address}/{name}");
            let text = std::fs::read_to_string(path).ok()?;
            Some(text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        let link = read("max_link_speed").zip(read("max_link_width"));
        Ok(link.map(|(speed, lanes)| PcieLink { address: address.clone(), speed, lanes }))
    }
}

/// Returns the first word of numbers and dots in the line of the kernel module.
fn version_in(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_found_among_other_words() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 13.2.0\n";
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n";
        assert_eq!(version_in(open).as_deref(), Some("570.86.15"));
        assert_eq!(version_in(closed).as_deref(), Some("550.54.15"));
        assert_eq!(version_in("GCC version: 13.2.0\n"), None);
    }
}
