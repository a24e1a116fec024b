//! Loads of all weights of a file or folder: `include/forebay_load.h` is the documentation.

use std::ffi::{OsStr, c_char, c_int, c_void};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use forebay_engine::load::{DeviceRequest, HoldRequest, hold};
use forebay_store::IoKind;

use crate::option_names::use_fields;
use crate::out_parameters::{bytes_of, put, put_struct, put_text};
use crate::status::{self, Failure, Status};
use crate::{on_thread, weights};

/// Flag: elements share blocks, so data type and shape for DLPack are those of bytes.
const TENSOR_BLOCKS: u32 = 1;
/// Flag: entries of the outermost dimension are further apart than they are long.
const TENSOR_APART: u32 = 2;
/// Flag: the file has the elements compressed.
const TENSOR_DECODED: u32 = 4;

type Progress = unsafe extern "C" fn(*mut c_void, u64, u64) -> c_int;

/// `forebay_load_options` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LoadOptions {
    struct_bytes: u64,
    engine: u32,
    verify: u32,
    read_back: u32,
    stored: u32,
    vram_bytes: u64,
    pinned_bytes: u64,
    progress: Option<Progress>,
    progress_user: *mut c_void,
}

/// `forebay_tensor` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    name: *const c_char,
    type_name: *const c_char,
    shape: *const i64,
    data: *mut c_void,
    bytes: u64,
    stride_bytes: u64,
    file_offset: u64,
    file_stride_bytes: u64,
    file: u32,
    rank: i32,
    flags: u32,
    ggml_type: i32,
    dlpack_code: u8,
    dlpack_bits: u8,
    dlpack_lanes: u16,
    reserved: u32,
}

/// `forebay_load_statistics` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Statistics {
    tensors: u64,
    files: u64,
    bytes: u64,
    read_bytes: u64,
    cached_bytes: u64,
    memory_bytes: u64,
    pinned_bytes: u64,
    seconds: f64,
    setup_seconds: f64,
    bytes_per_second: f64,
    cpu_seconds: f64,
}

// The C test asserts the same sizes.
const _: () = assert!(size_of::<*mut c_void>() != 8 || size_of::<LoadOptions>() == 56);
const _: () = assert!(size_of::<*mut c_void>() != 8 || size_of::<Tensor>() == 88);
const _: () = assert!(size_of::<Statistics>() == 88);

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            struct_bytes: size_of::<LoadOptions>() as u64,
            engine: 0,
            verify: 1,
            read_back: 0,
            stored: 0,
            vram_bytes: 0,
            pinned_bytes: 0,
            progress: None,
            progress_user: std::ptr::null_mut(),
        }
    }
}

/// # Safety
/// `options` is null or valid for writes of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_load_options_init(
    options: *mut LoadOptions,
    bytes: usize,
) -> Status {
    // SAFETY: the caller makes the same promise.
    on_thread(|| unsafe { put_struct(options, bytes, LoadOptions::default(), "options") })
}

/// Returns the GPU that a text names, or `None` for host memory.
fn device(name: &[u8]) -> Result<Option<usize>, Failure> {
    let unknown = || {
        let name = String::from_utf8_lossy(name);
        Failure::argument(&format!("there is no device {name:?}: cpu, cuda and cuda:N are known"))
    };
    match std::str::from_utf8(name).map_err(|_| unknown())? {
        "cpu" => Ok(None),
        "cuda" => Ok(Some(0)),
        other => {
            let number = other
                .strip_prefix("cuda:")
                .filter(|digits| digits.bytes().all(|it| it.is_ascii_digit()));
            number.and_then(|number| number.parse().ok()).map(Some).ok_or_else(unknown)
        }
    }
}

fn resolve(options: &LoadOptions, ordinal: Option<usize>) -> Result<HoldRequest, Failure> {
    let io = match options.engine {
        0 => IoKind::Auto,
        1 => IoKind::Uring,
        2 => IoKind::Pread,
        other => return Err(Failure::argument(&format!("there is no engine {other}"))),
    };
    if options.stored > 1 {
        return Err(Failure::argument("stored must be 0 or 1"));
    }
    let device = match ordinal {
        None if options.vram_bytes != 0 || options.pinned_bytes != 0 || options.read_back != 0 => {
            return Err(Failure::argument(
                "vram_bytes, pinned_bytes and read_back are for loads to a GPU",
            ));
        }
        None => None,
        Some(ordinal) => {
            let request = DeviceRequest {
                vram_bytes: (options.vram_bytes != 0).then_some(options.vram_bytes),
                check: options.read_back != 0,
                ..DeviceRequest::new(ordinal)
            };
            Some(match usize::try_from(options.pinned_bytes).unwrap_or(usize::MAX) {
                0 => request,
                bytes => request.within_pinned(bytes)?,
            })
        }
    };
    Ok(HoldRequest { io, verify: options.verify != 0, decode: options.stored == 0, device })
}

/// # Safety
/// `options` is valid for reads of as many bytes as its first field says.
unsafe fn read_options(options: *const LoadOptions) -> Result<LoadOptions, Failure> {
    // SAFETY: as promised. The first field is in every version.
    if unsafe { options.cast::<u64>().read_unaligned() } != size_of::<LoadOptions>() as u64 {
        return Err(Failure::argument("options were not made by forebay_load_options_init"));
    }
    // SAFETY: as promised.
    Ok(unsafe { options.read_unaligned() })
}

/// # Safety
/// `path` and `device` are null or texts that end with a zero byte. `options` is null or valid, and its function may be
/// called. `weights` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_load(
    path: *const c_char,
    device: *const c_char,
    options: *const LoadOptions,
    weights: *mut u64,
) -> Status {
    on_thread(|| {
        // SAFETY: as promised.
        unsafe { put(weights, 0, "weights") }?;
        // SAFETY: as promised.
        let (path, name) = unsafe { (bytes_of(path, "path")?, bytes_of(device, "device")?) };
        let options = match options.is_null() {
            true => LoadOptions::default(),
            // SAFETY: not null, and valid as promised.
            false => unsafe { read_options(options) }?,
        };
        use_fields();
        let request = resolve(&options, self::device(name)?)?;
        let mut progress = |done, total| match options.progress {
            // SAFETY: the caller promises that the function may be called.
            Some(tell) if unsafe { tell(options.progress_user, done, total) } != 0 => {
                ControlFlow::Break(())
            }
            _ => ControlFlow::Continue(()),
        };
        let held = hold(Path::new(OsStr::from_bytes(path)), &request, &mut progress)?;
        // SAFETY: as promised.
        unsafe { put(weights, weights::add(held), "weights") }
    })
}

/// # Safety
/// `count` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_weights_count(weights: u64, count: *mut usize) -> Status {
    on_thread(|| {
        let weights = weights::find(weights)?;
        // SAFETY: as promised.
        unsafe { put(count, weights.held.tensors.len(), "count") }
    })
}

/// # Safety
/// `tensor` is null or valid for writes of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_weights_tensor(
    weights: u64,
    index: usize,
    tensor: *mut Tensor,
    bytes: usize,
) -> Status {
    on_thread(|| {
        let weights = weights::find(weights)?;
        let it = weights.tensor(index)?;
        let held = &weights.held.tensors[index];
        let info = &held.info;
        let (stored, is_coded) = weights.held.stored(held);
        let entries = info.shape.first().copied().unwrap_or(1);
        let flags = [
            (held.ty.is_quantized(), TENSOR_BLOCKS),
            (held.stride.saturating_mul(entries) > held.bytes() && entries > 1, TENSOR_APART),
            (held.decoded_from().is_some() || is_coded, TENSOR_DECODED),
        ];
        let value = Tensor {
            name: it.name.as_ptr(),
            type_name: it.type_name.as_ptr(),
            shape: it.shape.as_ptr(),
            data: it.data(),
            bytes: held.bytes(),
            stride_bytes: held.stride,
            file_offset: stored.offset,
            file_stride_bytes: info.stride,
            file: info.extent.file.0,
            rank: it.shape.len() as i32,
            flags: flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum(),
            ggml_type: held.ty.ggml_id().map_or(-1, |id| id as i32),
            dlpack_code: it.data_type.code,
            dlpack_bits: it.data_type.bits,
            dlpack_lanes: it.data_type.lanes,
            reserved: 0,
        };
        // SAFETY: as promised.
        unsafe { put_struct(tensor, bytes, value, "tensor") }
    })
}

/// # Safety
/// `name` is null or a text that ends with a zero byte. `index` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_weights_find(
    weights: u64,
    name: *const c_char,
    index: *mut usize,
) -> Status {
    on_thread(|| {
        let weights = weights::find(weights)?;
        // SAFETY: as promised.
        let name = unsafe { bytes_of(name, "name") }?;
        let found = std::str::from_utf8(name).ok().and_then(|name| weights.held.find(name));
        let found = found.ok_or_else(|| {
            let words = format!("there is no tensor {:?}", String::from_utf8_lossy(name));
            Failure::new(status::UNKNOWN_TENSOR, words)
        })?;
        // SAFETY: as promised.
        unsafe { put(index, found, "index") }
    })
}

/// # Safety
/// `text` is null or valid for writes of `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_weights_file(
    weights: u64,
    file: u32,
    text: *mut c_char,
    capacity: usize,
) -> Status {
    on_thread(|| {
        let weights = weights::find(weights)?;
        let files = &weights.held.files;
        let path = files.get(file as usize).ok_or_else(|| {
            let words = format!("there is no file {file}: there are {}", files.len());
            Failure::new(status::UNKNOWN_FILE, words)
        })?;
        // SAFETY: as promised.
        unsafe { put_text(&path.to_string_lossy(), text, capacity) }
    })
}

/// # Safety
/// `statistics` is null or valid for writes of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_weights_statistics(
    weights: u64,
    statistics: *mut Statistics,
    bytes: usize,
) -> Status {
    on_thread(|| {
        let weights = weights::find(weights)?;
        let (held, of) = (&weights.held, &weights.held.statistics);
        let value = Statistics {
            tensors: held.tensors.len() as u64,
            files: held.files.len() as u64,
            bytes: of.bytes,
            read_bytes: of.engine_bytes,
            cached_bytes: of.cached_bytes,
            memory_bytes: held.memory_bytes(),
            pinned_bytes: held.pinned_bytes,
            seconds: of.seconds,
            setup_seconds: held.setup_seconds,
            bytes_per_second: of.bytes as f64 / of.seconds,
            cpu_seconds: of.cpu_seconds,
        };
        // SAFETY: as promised.
        unsafe { put_struct(statistics, bytes, value, "statistics") }
    })
}

/// # Safety
/// `text` is null or valid for writes of `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_weights_describe(
    weights: u64,
    text: *mut c_char,
    capacity: usize,
) -> Status {
    on_thread(|| {
        let weights = weights::find(weights)?;
        let line = weights.held.engine.as_ref().map_or("page cache".to_owned(), |info| {
            let path = if info.direct { "O_DIRECT" } else { "page cache" };
            let why = if info.why.is_empty() { String::new() } else { format!(" ({})", info.why) };
            format!("{}, {path}{why}", info.name)
        });
        // SAFETY: as promised.
        unsafe { put_text(&line, text, capacity) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn forebay_weights_free(weights: u64) -> Status {
    on_thread(|| weights::remove(weights))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_by_name() {
        let of = |name: &str| device(name.as_bytes()).map_err(|failure| failure.status);
        assert_eq!(of("cpu"), Ok(None));
        assert_eq!(of("cuda"), Ok(Some(0)));
        assert_eq!(of("cuda:12"), Ok(Some(12)));
        for wrong in [
            "",
            "gpu",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:1x",
            "CPU",
            "cuda:99999999999999999999",
        ] {
            assert_eq!(of(wrong), Err(status::INVALID_ARGUMENT), "{wrong}");
        }
    }
}
