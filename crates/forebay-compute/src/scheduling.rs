//! How soon the system runs a thread that has work again.

use std::io;

/// Time that a thread asks for at once, in nanoseconds: the shortest that Linux grants.
#[cfg(target_os = "linux")]
const SLICE_NANOSECONDS: u64 = 100_000;

/// Asks the system to run this thread as soon as it has work, in place of threads that compute on all processors. Threads that it
/// starts later do the same. For threads that do little at a time, such as those that talk to clients: they would wait some
/// milliseconds each time otherwise.
///
/// Linux from 6.12 on lets a thread with a shorter slice of time interrupt others. Earlier ones take no notice. Priorities stay as
/// they are, and so do threads with a real-time policy or one for idle processors.
///
/// # Errors
/// Returns the error of the system if it forbids this.
#[cfg(target_os = "linux")]
pub fn run_promptly() -> io::Result<()> {
    let mut attributes = attributes()?;
    let policy = attributes.sched_policy.cast_signed();
    if policy != libc::SCHED_OTHER && policy != libc::SCHED_BATCH {
        return Ok(());
    }
    attributes.sched_runtime = SLICE_NANOSECONDS;
    // SAFETY: the attributes are initialized, and as large as they say. The kernel only reads them. 0 is this thread.
    let status = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Does nothing, because only Linux has slices.
///
/// # Errors
/// Returns none.
#[cfg(not(target_os = "linux"))]
pub fn run_promptly() -> io::Result<()> {
    Ok(())
}

/// Returns how the system runs this thread.
#[cfg(target_os = "linux")]
fn attributes() -> io::Result<libc::sched_attr> {
    let bytes = u32::try_from(size_of::<libc::sched_attr>()).expect("the struct is small");
    let mut attributes = libc::sched_attr {
        size: bytes,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel writes at most `bytes` bytes to the attributes, which are that large. 0 is this thread.
    let status =
        unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, bytes, 0) };
    if status == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_asks_for_short_slices_and_keeps_its_priority() {
        let thread = std::thread::spawn(|| {
            // SAFETY: this changes the priority of this thread only, which ends with the test.
            assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 3) }, 0);
            let Ok(before) = attributes() else {
                return eprintln!("skipped: the system does not tell how it runs threads");
            };
            run_promptly().unwrap();
            let after = attributes().unwrap();
            assert_eq!((after.sched_policy, after.sched_nice), (before.sched_policy, 3));
            // Kernels before 6.12 tell no slice.
            if before.sched_runtime > 0 {
                assert_eq!(after.sched_runtime, SLICE_NANOSECONDS);
            }
        });
        thread.join().unwrap();
    }
}
