//! Tensor operations on the CPU: the thread pool, element-wise operations, attention with its
//! key/value cache, and products with quantised weights.
//!
//! Nothing here knows of files or of models: slices come in, slices go out. Every operation gives
//! the same bits for every number of threads.

mod buffer;
mod cpu;
mod error;
mod matmul;
mod pool;

pub use cpu::{Arithmetic, Cpu, Isa, default_threads};
pub use error::ComputeError;
pub use matmul::{Activations, MatmulJob, Matrix};
pub use pool::Pool;
