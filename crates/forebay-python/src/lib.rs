//! The part of the Python package `forebay` that is written in Rust: `forebay._native`.
//!
//! Every call that waits releases the GIL. Errors become the exceptions of `forebay._errors`.

mod engine;
mod errors;
mod load;
mod log;
mod mailbox;
mod measure;
mod modules;
mod names;
mod option_names;
mod options;
mod run;
mod save;
mod stream;
mod table;
mod tensor;
mod watch;

use pyo3::prelude::*;

/// Tables, loads and tensors. `forebay` documents the interface for programs.
#[pymodule]
#[pyo3(name = "_native")]
mod native {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::option_names::use_arguments();
        Ok(())
    }

    #[pymodule_export]
    use super::engine::Engine;
    #[pymodule_export]
    use super::load::load;
    #[pymodule_export]
    use super::log::{log_start, log_take};
    #[pymodule_export]
    use super::measure::{assess, plan, replay};
    #[pymodule_export]
    use super::modules::{CodedModules, ModuleStream, default_ram};
    #[pymodule_export]
    use super::run::{Run, Wake};
    #[pymodule_export]
    use super::save::save;
    #[pymodule_export]
    use super::stream::Stream;
    #[pymodule_export]
    use super::table::Table;
    #[pymodule_export]
    use super::tensor::Tensor;

    /// Version of the package.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// Most texts of one call that wait for their embeddings.
    #[pymodule_export]
    const EMBEDDINGS_QUEUED: usize = forebay_requests::embed::QUEUED_MAX;
}
