//! The C interface. `include/forebay.h` documents block reads. `include/forebay_load.h` documents loads of all weights
//! of a file or folder, whose tensors are available in the form of DLPack.
//!
//! Handles are numbers, not addresses, so that a wrong handle is an error. No panic crosses the border to C.

mod dlpack;
mod load;
mod option_names;
mod out_parameters;
mod registry;
mod status;
mod weights;

use std::cell::RefCell;
use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use forebay_store::{
    EngineOptions, FileIndex, IoKind, Priority, RawReader, RawRequest, ReadAnswer, ReadRequest,
    ReaderEnd, ReaderOptions,
};

use out_parameters::{put, put_text};
use registry::{Entry, lock};
use status::{Failure, Status};

const ABI_VERSION: u32 = 2;

/// `forebay_options` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    engine: u32,
    cached: u32,
    queue_depth: u32,
    threads: u32,
    request_bytes: u64,
    staging_bytes: u64,
    requests_max: u64,
    stall_milliseconds: u64,
}

/// `forebay_request` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Request {
    offset: u64,
    length: u64,
    destination: *mut c_void,
    user_data: u64,
    file: u32,
    priority: u32,
}

/// `forebay_completion` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Completion {
    user_data: u64,
    bytes: u64,
    status: Status,
    error_number: i32,
}

// The C test asserts the same sizes.
const _: () = assert!(size_of::<Options>() == 48);
const _: () = assert!(size_of::<*mut c_void>() != 8 || size_of::<Request>() == 40);
const _: () = assert!(size_of::<Completion>() == 24);

thread_local! {
    /// Message of this thread's last failed call that had no reader.
    static THREAD_WORDS: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of a call and turns a panic into a status.
fn guarded(words: impl FnOnce(&str), body: impl FnOnce() -> Result<(), Failure>) -> Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => status::OK,
        Ok(Err(failure)) => {
            words(&failure.words);
            failure.status
        }
        Err(_) => {
            words("the library has a defect: it panicked");
            status::PANIC
        }
    }
}

/// Runs a call that has no reader. The thread keeps its error message.
fn on_thread(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    guarded(|text| THREAD_WORDS.with_borrow_mut(|words| *words = text.to_owned()), body)
}

/// Runs a call on a reader. The reader keeps its error message.
fn on_entry(number: u64, body: impl FnOnce(&Entry) -> Result<(), Failure>) -> Status {
    let entry = registry::find(number);
    let words = |text: &str| {
        if let Ok(entry) = &entry {
            *lock(&entry.words) = text.to_owned();
        }
    };
    guarded(words, || match &entry {
        Ok(entry) => body(entry),
        Err(failure) => Err(Failure::new(failure.status, failure.words.clone())),
    })
}

fn on_reader(
    number: u64,
    body: impl FnOnce(&mut RawReader, &Entry) -> Result<(), Failure>,
) -> Status {
    on_entry(number, |entry| {
        let mut place = lock(&entry.reader);
        let reader = place.as_mut().ok_or_else(|| registry::bad(number))?;
        body(reader, entry)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn forebay_abi_version() -> u32 {
    ABI_VERSION
}

#[unsafe(no_mangle)]
pub extern "C" fn forebay_status_name(status: Status) -> *const c_char {
    let name = usize::try_from(status).ok().and_then(|index| status::NAMES.get(index));
    name.map_or(c"unknown status".as_ptr(), |name| name.as_ptr())
}

/// # Safety
/// `options` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_options_init(options: *mut Options) -> Status {
    let defaults = ReaderOptions::default();
    let value = Options {
        engine: 0,
        cached: 0,
        queue_depth: defaults.engine.queue_depth as u32,
        threads: defaults.engine.threads as u32,
        request_bytes: defaults.engine.request_bytes as u64,
        staging_bytes: defaults.staging_bytes as u64,
        requests_max: defaults.requests_max as u64,
        stall_milliseconds: defaults.engine.stall_timeout.as_millis() as u64,
    };
    // SAFETY: the caller makes the same promise.
    guarded(|_| {}, || unsafe { put(options, value, "options") })
}

fn resolve(options: &Options) -> Result<ReaderOptions, Failure> {
    let io = match options.engine {
        0 => IoKind::Auto,
        1 => IoKind::Uring,
        2 => IoKind::Pread,
        other => return Err(Failure::argument(&format!("there is no engine {other}"))),
    };
    let size = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let defaults = ReaderOptions::default();
    let queue_depth = options.queue_depth as usize;
    if options.requests_max == 0 || options.staging_bytes == 0 {
        return Err(Failure::argument("requests_max and staging_bytes must be above 0"));
    }
    Ok(ReaderOptions {
        io,
        engine: EngineOptions {
            queue_depth,
            background_depth: defaults.engine.background_depth.min(queue_depth.max(1)),
            threads: options.threads as usize,
            request_bytes: size(options.request_bytes),
            direct: options.cached == 0,
            stall_timeout: Duration::from_millis(options.stall_milliseconds),
            ..defaults.engine
        },
        staging_bytes: size(options.staging_bytes),
        requests_max: size(options.requests_max),
    })
}

/// # Safety
/// `paths` holds `count` addresses of texts that end with a zero byte. `options` is null or valid. `reader` is null or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_open(
    paths: *const *const c_char,
    count: usize,
    options: *const Options,
    reader: *mut u64,
) -> Status {
    on_thread(|| {
        // SAFETY: as promised.
        unsafe { put(reader, 0, "reader") }?;
        if paths.is_null() || count == 0 {
            return Err(Failure::argument("there are no paths"));
        }
        let mut files = Vec::new();
        for index in 0..count {
            // SAFETY: `paths` holds `count` addresses.
            let path = unsafe { paths.add(index).read_unaligned() };
            if path.is_null() {
                return Err(Failure::argument(&format!("path {index} is a null pointer")));
            }
            // SAFETY: not null, and ends with a zero byte as promised.
            files.push(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()).to_owned());
        }
        let options = match options.is_null() {
            true => ReaderOptions::default(),
            // SAFETY: not null, and valid as promised.
            false => resolve(&unsafe { options.read_unaligned() })?,
        };
        let opened = RawReader::open(&files, &options)?;
        // SAFETY: as promised.
        unsafe { put(reader, registry::add(opened), "reader") }
    })
}

/// # Safety
/// `bytes` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_file_bytes(reader: u64, file: u32, bytes: *mut u64) -> Status {
    on_reader(reader, |reader, _| {
        let size = reader.file_bytes(FileIndex(file)).ok_or_else(|| unknown(reader, file))?;
        // SAFETY: as promised.
        unsafe { put(bytes, size, "bytes") }
    })
}

/// # Safety
/// `bytes` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_alignment(reader: u64, file: u32, bytes: *mut u64) -> Status {
    on_reader(reader, |reader, _| {
        let unit = reader.alignment(FileIndex(file)).ok_or_else(|| unknown(reader, file))?;
        // SAFETY: as promised.
        unsafe { put(bytes, unit as u64, "bytes") }
    })
}

fn unknown(reader: &RawReader, file: u32) -> Failure {
    let words = format!("there is no file {file}: {} are open", reader.files());
    Failure::new(status::UNKNOWN_FILE, words)
}

/// # Safety
/// `text` is null or valid for writes of `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_describe(
    reader: u64,
    text: *mut c_char,
    capacity: usize,
) -> Status {
    on_reader(reader, |reader, _| {
        let info = reader.describe();
        let path = if info.direct { "O_DIRECT" } else { "page cache" };
        let why = if info.why.is_empty() { String::new() } else { format!(" ({})", info.why) };
        // SAFETY: as promised.
        unsafe { put_text(&format!("{}, {path}{why}", info.name), text, capacity) }
    })
}

fn raw(request: &Request) -> Result<RawRequest, Failure> {
    if request.destination.is_null() && request.length > 0 {
        return Err(Failure::argument("a destination is a null pointer"));
    }
    let priority = match request.priority {
        0 => Priority::Demand,
        1 => Priority::ReadAhead,
        2 => Priority::Load,
        other => return Err(Failure::argument(&format!("there is no priority {other}"))),
    };
    let length = usize::try_from(request.length).unwrap_or(usize::MAX);
    let read = ReadRequest {
        tag: request.user_data,
        file: FileIndex(request.file),
        offset: request.offset,
        length,
        priority,
    };
    Ok(RawRequest { read, destination: request.destination.cast() })
}

/// # Safety
/// `destination` is valid for writes of `length` bytes, and nothing else uses these during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_read(
    reader: u64,
    file: u32,
    offset: u64,
    length: u64,
    destination: *mut c_void,
) -> Status {
    on_reader(reader, |reader, _| {
        let request = Request { offset, length, destination, user_data: 0, file, priority: 0 };
        let request = raw(&request)?;
        reader.claim()?;
        // SAFETY: as promised.
        let answer = unsafe { reader.read(request) }?;
        match answer.ok_or_else(full)?.end {
            ReaderEnd::Done => Ok(()),
            ReaderEnd::Failed(error) => {
                Err(Failure::new(status::of_read(&error).0, error.to_string()))
            }
        }
    })
}

fn full() -> Failure {
    Failure::new(status::FULL, "too many requests have no answer yet: wait for some")
}

/// # Safety
/// `requests` holds `count` requests, with destinations that follow the header's buffer rule. `accepted` is null or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_submit(
    reader: u64,
    requests: *const Request,
    count: usize,
    accepted: *mut usize,
) -> Status {
    on_reader(reader, |reader, _| {
        reader.claim()?;
        let mut taken = 0;
        let mut submit = || {
            if requests.is_null() && count > 0 {
                return Err(Failure::argument("requests is a null pointer"));
            }
            for index in 0..count {
                // SAFETY: `requests` holds `count` requests.
                let request = raw(&unsafe { requests.add(index).read_unaligned() })?;
                // SAFETY: the caller follows the buffer rule.
                if !unsafe { reader.submit(request) } {
                    return Err(full());
                }
                taken += 1;
            }
            Ok(())
        };
        let submitted = submit();
        if !accepted.is_null() {
            // SAFETY: not null, and valid as promised.
            unsafe { accepted.write_unaligned(taken) };
        }
        reader.progress()?;
        submitted
    })
}

/// # Safety
/// `completions` is null or valid for writes of `capacity` completions, and `count` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_poll(
    reader: u64,
    completions: *mut Completion,
    capacity: usize,
    count: *mut usize,
) -> Status {
    // SAFETY: the caller makes the same promise.
    unsafe { collect(reader, completions, capacity, count, RawReader::poll) }
}

/// # Safety
/// The requirements of [`forebay_poll`] hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_wait(
    reader: u64,
    completions: *mut Completion,
    capacity: usize,
    count: *mut usize,
) -> Status {
    // SAFETY: the caller makes the same promise.
    unsafe { collect(reader, completions, capacity, count, RawReader::wait) }
}

type First = fn(&mut RawReader) -> Result<Option<ReadAnswer>, forebay_store::StoreError>;

/// # Safety
/// The requirements of [`forebay_poll`] hold.
unsafe fn collect(
    reader: u64,
    completions: *mut Completion,
    capacity: usize,
    count: *mut usize,
    first: First,
) -> Status {
    on_reader(reader, |reader, entry| {
        // SAFETY: as promised.
        unsafe { put(count, 0, "count") }?;
        if completions.is_null() || capacity == 0 {
            return Err(Failure::argument("there is no room for completions"));
        }
        reader.claim()?;
        let mut handed = 0;
        let mut next = first(reader)?;
        while let Some(answer) = next {
            // SAFETY: handed < capacity.
            unsafe { completions.add(handed).write_unaligned(completed(&answer, entry)) };
            handed += 1;
            // SAFETY: as promised. The count is written at once, so that nothing is lost if the engine fails.
            unsafe { put(count, handed, "count") }?;
            next = if handed < capacity { reader.poll()? } else { None };
        }
        Ok(())
    })
}

fn completed(answer: &ReadAnswer, entry: &Entry) -> Completion {
    let (user_data, bytes) = (answer.tag, answer.bytes);
    match &answer.end {
        ReaderEnd::Done => Completion { user_data, bytes, status: status::OK, error_number: 0 },
        ReaderEnd::Failed(error) => {
            *lock(&entry.words) = error.to_string();
            let (status, error_number) = status::of_read(error);
            // A stalled read takes precedence over its error, because the caller must know that the memory is still in
            // use.
            let status = if answer.destination_is_free { status } else { status::STALLED };
            Completion { user_data, bytes: 0, status, error_number }
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn forebay_cancel(reader: u64, user_data: u64) -> Status {
    on_reader(reader, |reader, _| {
        reader.cancel(user_data);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn forebay_close(reader: u64) -> Status {
    let number = reader;
    on_entry(number, |entry| {
        let mut place = lock(&entry.reader);
        let open = place.as_mut().ok_or_else(|| registry::bad(number))?;
        let all_free = match open.close() {
            Ok(all_free) => all_free,
            Err(error @ forebay_store::StoreError::WrongThread { .. }) => return Err(error.into()),
            Err(error) => {
                // The state of the destinations is unknown from here on.
                registry::remove(number);
                drop(place.take());
                let words = format!("closed, but the destinations must stay: {error}");
                return Err(Failure::new(status::STALLED, words));
            }
        };
        registry::remove(number);
        drop(place.take());
        match all_free {
            true => Ok(()),
            false => Err(Failure::new(
                status::STALLED,
                "closed, but the disk has not answered all: their destinations must stay",
            )),
        }
    })
}

/// # Safety
/// `text` is null or valid for writes of `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_last_error(
    reader: u64,
    text: *mut c_char,
    capacity: usize,
) -> Status {
    guarded(
        |_| {},
        || {
            let words = match reader {
                0 => THREAD_WORDS.with_borrow(Clone::clone),
                number => lock(&registry::find(number)?.words).clone(),
            };
            // SAFETY: as promised.
            unsafe { put_text(&words, text, capacity) }
        },
    )
}
