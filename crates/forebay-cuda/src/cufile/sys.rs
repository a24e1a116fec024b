//! The functions of libcufile that this crate calls, found at run time. Answers stay plain numbers, because a newer
//! library may return numbers that no list here contains.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

use libloading::{Library, Symbol};

use super::CuFileError;

/// Names and paths of the library, in the order of search: first what the loader knows, then the toolkit's usual path.
const NAMES: [&str; 3] = ["libcufile.so.0", "libcufile.so", "/usr/local/cuda/lib64/libcufile.so.0"];

/// `CUfileError_t`: cuFile's error, and the driver's error if that is the cause.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Status {
    pub code: c_int,
    pub cuda: c_int,
}

/// `CUfileHandle_t`.
pub(super) type Handle = *mut c_void;

/// `CUfileDescr_t` for a file given by its descriptor.
#[repr(C)]
pub(super) struct Description {
    pub kind: c_int,
    pub handle: DescriptionHandle,
    pub operations: *const c_void,
}

#[repr(C)]
pub(super) union DescriptionHandle {
    pub descriptor: c_int,
    pub handle: *mut c_void,
}

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
pub(super) const DESCRIPTOR: c_int = 1;

/// `CUfileDrvProps_t`, with room for what newer libraries may append.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Properties {
    pub nvfs_major: c_uint,
    pub nvfs_minor: c_uint,
    pub poll_threshold_bytes: usize,
    pub max_direct_io_bytes: usize,
    pub status_flags: c_uint,
    pub control_flags: c_uint,
    pub features: c_uint,
    /// Fields that are not used here.
    pub rest: [u64; 64],
}

type NoArguments = unsafe extern "C" fn() -> Status;

/// Functions of the library, which is never unloaded, because its own threads outlive its last user.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    pub driver_open: NoArguments,
    pub driver_close: NoArguments,
    pub get_properties: unsafe extern "C" fn(*mut Properties) -> Status,
    /// `None` in the oldest libraries.
    pub get_version: Option<unsafe extern "C" fn(*mut c_int) -> Status>,
    pub handle_register: unsafe extern "C" fn(*mut Handle, *mut Description) -> Status,
    pub handle_deregister: unsafe extern "C" fn(Handle),
    pub memory_register: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    pub memory_deregister: unsafe extern "C" fn(*const c_void) -> Status,
    pub read: unsafe extern "C" fn(Handle, *mut c_void, usize, libc::off_t, libc::off_t) -> isize,
}

impl Functions {
    pub fn load() -> Result<Functions, CuFileError> {
        let mut why = String::new();
        for name in NAMES {
            // SAFETY: the library's initialisers have no preconditions.
            match unsafe { Library::new(name) } {
                Ok(library) => return Functions::of(&ManuallyDrop::new(library)),
                // The first error says why the loader refuses the library; later ones only say that another path has
                // none.
                Err(error) if why.is_empty() => why = error.to_string(),
                Err(_) => {}
            }
        }
        Err(CuFileError::NotFound { why })
    }

    fn of(library: &Library) -> Result<Functions, CuFileError> {
        // SAFETY: names and types are those of cufile.h, and the library stays loaded. The old form of the close
        // function is named `cuFileDriverClose`; the new form has a `_v2` suffix.
        unsafe {
            Ok(Functions {
                driver_open: symbol(library, c"cuFileDriverOpen")?,
                driver_close: symbol(library, c"cuFileDriverClose_v2")
                    .or_else(|_| symbol(library, c"cuFileDriverClose"))?,
                get_properties: symbol(library, c"cuFileDriverGetProperties")?,
                get_version: symbol(library, c"cuFileGetVersion").ok(),
                handle_register: symbol(library, c"cuFileHandleRegister")?,
                handle_deregister: symbol(library, c"cuFileHandleDeregister")?,
                memory_register: symbol(library, c"cuFileBufRegister")?,
                memory_deregister: symbol(library, c"cuFileBufDeregister")?,
                read: symbol(library, c"cuFileRead")?,
            })
        }
    }
}

/// Finds a function of the library by its name.
///
/// # Safety
/// `F` must be the type of the function of this name, and the library must never be unloaded.
unsafe fn symbol<F: Copy>(library: &Library, name: &'static CStr) -> Result<F, CuFileError> {
    // SAFETY: the caller guarantees the type, and the library stays loaded.
    let found: Result<Symbol<'_, F>, _> = unsafe { library.get(name.to_bytes_with_nul()) };
    let found =
        found.map_err(|_| CuFileError::MissingFunction { name: name.to_str().unwrap_or("") });
    Ok(*found?)
}
