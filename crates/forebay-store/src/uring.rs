//! A device that reads with io_uring. One system call starts many reads, and the kernel writes to
//! memory that was registered before.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};

use crate::arena::{Arena, Mapping};
use crate::device::{Device, Finished, Transfer, why_not_direct};
use crate::engine::{EngineInfo, EngineOptions};
use crate::error::StoreError;
use crate::files::FileSet;

const NAME: &str = "io_uring";
/// Maximum size of one registered buffer. The kernel accepts at most 1 GiB.
const REGISTERED_BYTES: usize = 1 << 30;
/// Pause before the kernel is entered again after it had no memory for requests.
const BUSY_PAUSE: Duration = Duration::from_millis(1);

pub(crate) struct Uring {
    // This is the first field, so that the ring closes before its memory is unmapped and its files
    // are closed.
    ring: Ring,
    depth: u32,
    descriptors: Vec<RawFd>,
    mapping: Option<Arc<Mapping>>,
    _files: FileSet,
    not_direct: Option<String>,
    started: Instant,
    writing: usize,
}

struct Ring {
    uring: IoUring,
    /// True if the kernel posts completions only when the owner thread enters it. No other thread
    /// may then enter the kernel for this ring.
    deferred: bool,
    /// The thread that submitted first.
    owner: Option<ThreadId>,
    buffers: Registration,
    why: Vec<String>,
}

/// State of the arena's registration with the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Registration {
    /// The arena is registered once its pages are resident. Registration would otherwise fault them
    /// in one after the other.
    Later,
    Done,
    Refused,
}

impl Uring {
    pub(crate) fn open(
        files: &FileSet,
        arena: &Arena,
        options: &EngineOptions,
    ) -> Result<Uring, StoreError> {
        let unavailable = |why: String| StoreError::Unavailable { engine: NAME, why };
        let descriptors = files.descriptors(options.direct, NAME)?;
        let depth = options.queue_depth as u32;
        let mapping = arena.mapping().cloned();
        let ring = Ring::build(depth, &descriptors, mapping.as_deref())
            .map_err(|error| unavailable(explain(&error)))?;
        Ok(Uring {
            ring,
            depth,
            descriptors,
            mapping,
            _files: files.clone(),
            not_direct: why_not_direct(files, options.direct),
            started: Instant::now(),
            writing: 0,
        })
    }

    /// Binds a ring with deferred completions to the thread that uses it. If another thread owned
    /// it, builds a new ring.
    fn own(&mut self) -> Result<(), StoreError> {
        if !self.ring.deferred {
            return Ok(());
        }
        let here = std::thread::current().id();
        if self.ring.owner == Some(here) {
            return Ok(());
        }
        let failed = |source| StoreError::Engine { engine: NAME, source };
        if self.ring.owner.is_some() {
            if self.writing > 0 {
                return Err(StoreError::WrongThread { writing: self.writing });
            }
            self.ring = Ring::build(self.depth, &self.descriptors, self.mapping.as_deref())
                .map_err(failed)?;
            if !self.ring.deferred {
                return Ok(());
            }
        }
        self.ring.uring.submitter().register_enable_rings().map_err(failed)?;
        self.ring.owner = Some(here);
        Ok(())
    }

    /// Returns the index of the registered buffer that contains the whole span, if there is one.
    fn buffer_index(&self, transfer: &Transfer) -> Option<u16> {
        let mapping = self.mapping.as_ref().filter(|_| self.ring.buffers == Registration::Done)?;
        let start = transfer.memory.addr().checked_sub(mapping.base().addr())?;
        let last = start + (transfer.length as usize).checked_sub(1)?;
        let index = start / REGISTERED_BYTES;
        let inside = last < mapping.length() && last / REGISTERED_BYTES == index;
        inside.then(|| u16::try_from(index).ok()).flatten()
    }

    fn entry(&self, transfer: &Transfer) -> squeue::Entry {
        let file = types::Fixed(transfer.file.0);
        let (memory, length) = (transfer.memory, transfer.length);
        let entry = match self.buffer_index(transfer) {
            Some(index) => {
                opcode::ReadFixed::new(file, memory, length, index).offset(transfer.offset).build()
            }
            None => opcode::Read::new(file, memory, length).offset(transfer.offset).build(),
        };
        entry.user_data(u64::from(transfer.key))
    }

    fn drain(&mut self, finished: &mut Vec<Finished>) {
        for entry in self.ring.uring.completion() {
            let result = u32::try_from(entry.result()).map_err(|_| -entry.result());
            finished.push(Finished { key: entry.user_data() as u32, result });
            self.writing -= 1;
        }
    }
}

impl Ring {
    fn build(
        depth: u32,
        descriptors: &[RawFd],
        mapping: Option<&Mapping>,
    ) -> std::io::Result<Ring> {
        let mut why = Vec::new();
        let (uring, deferred) = match IoUring::builder()
            .setup_r_disabled()
            .setup_submit_all()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(depth)
        {
            Ok(uring) => (uring, true),
            Err(error) => {
                let uring = IoUring::new(depth)?;
                why.push(format!("no deferred completions ({error}; they need Linux 6.1)"));
                (uring, false)
            }
        };
        if !uring.params().is_feature_ext_arg() {
            return Err(std::io::Error::other("waiting with a timeout needs Linux 5.11"));
        }
        if !descriptors.is_empty() {
            uring.submitter().register_files(descriptors)?;
        }
        let buffers = Registration::Later;
        let mut ring = Ring { uring, deferred, owner: None, buffers, why };
        if let Some(mapping) = mapping.filter(|mapping| mapping.is_resident()) {
            ring.register(mapping);
        }
        Ok(ring)
    }

    /// Registers the arena, so that the kernel pins and maps it once and not for every request.
    /// Reads also work without that, so a failure is only noted in `why`.
    fn register(&mut self, mapping: &Mapping) {
        let buffers: Vec<libc::iovec> = (0..mapping.length())
            .step_by(REGISTERED_BYTES)
            .map(|start| libc::iovec {
                iov_base: mapping.base().wrapping_add(start).cast(),
                iov_len: REGISTERED_BYTES.min(mapping.length() - start),
            })
            .collect();
        // SAFETY: the ranges tile the mapping, and `Uring` keeps it mapped for longer than the ring
        // lives.
        match unsafe { self.uring.submitter().register_buffers(&buffers) } {
            Ok(()) => self.buffers = Registration::Done,
            Err(error) => {
                self.buffers = Registration::Refused;
                let remedy = match error.raw_os_error() {
                    Some(libc::ENOMEM) => "; raise the limit on locked memory (ulimit -l)",
                    _ => "",
                };
                self.why.push(format!("buffers are not registered ({error}{remedy})"));
            }
        }
    }
}

fn explain(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM) => format!("{error}: a sandbox or kernel.io_uring_disabled forbids it"),
        Some(libc::ENOSYS) => format!("{error}: this kernel does not have it"),
        Some(libc::ENOMEM) => format!("{error}: the limit on locked memory is too low"),
        _ => error.to_string(),
    }
}

/// Returns true for errors of entering the kernel that are temporary, so that the caller may try
/// again.
fn is_passing(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME))
}

impl Device for Uring {
    unsafe fn start(&mut self, transfer: Transfer) -> Result<(), StoreError> {
        self.own()?;
        if self.ring.buffers == Registration::Later
            && let Some(mapping) = self.mapping.as_ref().filter(|mapping| mapping.is_resident())
        {
            self.ring.register(mapping);
        }
        let entry = self.entry(&transfer);
        // SAFETY: the caller promises that the memory stays valid and untouched until the transfer
        // is reported. The files stay open in `_files`.
        let pushed = unsafe { self.ring.uring.submission().push(&entry) };
        if pushed.is_err() {
            // The queue has an entry for every transfer of the queue depth, but the kernel may not
            // have consumed all earlier entries.
            self.flush()?;
            // SAFETY: the same promises hold as for the first push.
            unsafe { self.ring.uring.submission().push(&entry) }.map_err(|error| {
                let source = std::io::Error::other(error);
                StoreError::Engine { engine: NAME, source }
            })?;
        }
        self.writing += 1;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        if self.ring.uring.submission().is_empty() {
            return Ok(());
        }
        self.own()?;
        match self.ring.uring.submit() {
            Ok(_) => Ok(()),
            // The entries that remain in the queue are submitted by the next call.
            Err(error) if is_passing(&error) => Ok(()),
            Err(source) => Err(StoreError::Engine { engine: NAME, source }),
        }
    }

    fn reap(&mut self, finished: &mut Vec<Finished>) -> Result<(), StoreError> {
        // The kernel sets a flag when completions wait to be posted. If it is not set, only memory
        // is read and no system call is made.
        let queue = self.ring.uring.submission();
        let (due, unsent) = (queue.taskrun(), !queue.is_empty());
        drop(queue);
        if due || unsent {
            self.own()?;
            match self.ring.uring.submit() {
                Err(error) if !is_passing(&error) => {
                    return Err(StoreError::Engine { engine: NAME, source: error });
                }
                _ => {}
            }
        }
        self.drain(finished);
        Ok(())
    }

    fn wait(
        &mut self,
        want: usize,
        timeout: Duration,
        finished: &mut Vec<Finished>,
    ) -> Result<(), StoreError> {
        self.own()?;
        let timespec = types::Timespec::from(timeout);
        let arguments = types::SubmitArgs::new().timespec(&timespec);
        match self.ring.uring.submitter().submit_with_args(want.max(1), &arguments) {
            Ok(_) => {}
            Err(error) if is_passing(&error) => {
                if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) {
                    std::thread::sleep(BUSY_PAUSE.min(timeout));
                }
            }
            Err(source) => return Err(StoreError::Engine { engine: NAME, source }),
        }
        self.drain(finished);
        Ok(())
    }

    fn writing(&self) -> usize {
        self.writing
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn describe(&self) -> EngineInfo {
        let why: Vec<&str> =
            self.ring.why.iter().chain(&self.not_direct).map(String::as_str).collect();
        EngineInfo {
            name: NAME,
            direct: self.not_direct.is_none(),
            registered_buffers: self.ring.buffers == Registration::Done,
            why: why.join("; "),
        }
    }
}
