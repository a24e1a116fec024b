//! Output files that never destroy anything. Every command that writes a file uses them.
//!
//! [`Outputs`] decides before the work starts whether an output may be written. It refuses a file that exists (unless
//! the caller asked to replace it), a directory, a file that the command reads, and two outputs with one name. Devices
//! and pipes are written directly.
//!
//! Everything else is an [`OutputFile`]. It is written without a name, synced to the disk, and named last. Until then
//! the folder does not show it, and an error or a killed process leaves nothing behind. Where the file system has no
//! unnamed files, the output has a temporary name, which only a killed process (`SIGKILL`) leaves behind.
//! [`OutputStream`] writes an output front to back.
//!
//! ```
//! # use forebay_store::Outputs;
//! # use std::io::Write as _;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let (model, report) = (folder.path().join("model.gguf"), folder.path().join("report.html"));
//! # std::fs::write(&model, "weights")?;
//! let mut outputs = Outputs::new(false);
//! outputs.protect(&model);
//! assert!(outputs.create(&model).unwrap_err().is_refusal());
//! let mut page = outputs.create(&report)?.into_stream();
//! page.write_all(b"<!doctype html>")?;
//! assert!(!report.exists());
//! page.commit()?;
//! assert!(report.exists());
//! # Ok(())
//! # }
//! ```

mod error;
mod file;
mod rules;
mod stream;
mod temporary;

pub use error::OutputError;
pub use file::OutputFile;
pub use rules::Outputs;
pub use stream::{OutputStream, SharedStream};
pub use temporary::{TemporaryName, remove_unfinished};
