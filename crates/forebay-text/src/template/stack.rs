//! Stack for recursion that the template engine does not limit.
//!
//! The engine limits how deep templates call. But values and chains of operators can nest as deep
//! as a template has steps or bytes, and printing, comparing and dropping them recurses. Measured:
//! 300 bytes of stack per level to print a list of lists, 450 to compile `1 + 1 + ...`.

use std::thread;

use crate::TextError;

const BYTES_PER_LEVEL: u64 = 640;
const BYTES_BASE: u64 = 16 << 20;

/// Returns the bytes of the stack for `levels` levels of recursion.
pub fn bytes(levels: u64) -> u64 {
    BYTES_BASE + BYTES_PER_LEVEL * levels
}

/// Runs `work` on a stack for `levels` levels of recursion. The stack is reserved as address space;
/// memory is used only as deep as `work` goes.
///
/// # Errors
/// Returns an error if the stack cannot be reserved or `work` panicked.
pub fn with_room<T: Send>(levels: u64, work: impl FnOnce() -> T + Send) -> Result<T, TextError> {
    let bytes = bytes(levels);
    let failed = |reason: String| TextError::TemplateFailed { reason };
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("chat template".to_owned());
        let builder = builder.stack_size(usize::try_from(bytes).unwrap_or(usize::MAX));
        let worker = builder.spawn_scoped(scope, work);
        let worker = worker.map_err(|error| failed(format!("no thread for it: {error}")))?;
        worker.join().map_err(|_| failed("the template engine panicked".to_owned()))
    })
}
