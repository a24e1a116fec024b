//! Output files that never destroy anything: the one rule for every command that writes.
//!
//! [`Outputs`] decides before the work starts. It refuses a file that exists (unless the caller asked to replace it), a
//! directory, a file that the command reads, and two outputs with one name. Devices and pipes are written directly.
//! Everything else is an [`OutputFile`]: written without a name (or, where the file system cannot do that, under a
//! temporary name), synced to the disk, and named last. Until then nothing shows in the folder, and nothing stays there after
//! an error or a killed process. [`OutputStream`] writes such a file front to back.
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
pub use stream::OutputStream;
pub use temporary::{TemporaryName, remove_unfinished};
