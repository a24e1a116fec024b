//! The functions of libcufile that we call, found at run time. Numbers stay numbers: what a newer library answers need
//! not be in any list of ours.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

use libloading::{Library, Symbol};

use super::CuFileError;

/// Names and places that the library is looked for under: what the loader knows first, then the toolkit's usual place.
const NAMES: [&str; 3] = ["libcufile.so.0", "libcufile.so", "/usr/local/cuda/lib64/libcufile.so.0"];

/// `CUfileError_t`: cuFile's answer, and the driver's where that is the cause.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Status {
    pub code: c_int,
    pub cuda: c_int,
}

/// `CUfileHandle_t`.
pub(super) type Handle = *mut c_void;

/// `CUfileDescr_t` of a file by its descriptor.
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
    /// What we do not look at.
    pub rest: [u64; 64],
}

type NoArguments = unsafe extern "C" fn() -> Status;

/// The library, which is never unloaded: it has threads of its own that outlive its last user.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    pub driver_open: NoArguments,
    pub driver_close: NoArguments,
    pub get_properties: unsafe extern "C" fn(*mut Properties) -> Status,
    /// Not in the oldest libraries.
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
            // SAFETY: the library's initialisers expect nothing of us.
            match unsafe { Library::new(name) } {
                Ok(library) => return Functions::of(&ManuallyDrop::new(library)),
                // The first says why the loader refuses; the others, that there is nothing in another place.
                Err(error) if why.is_empty() => why = error.to_string(),
                Err(_) => {}
            }
        }
        Err(CuFileError::NotFound { why })
    }

    fn of(library: &Library) -> Result<Functions, CuFileError> {
        // SAFETY: names and types are those of cufile.h, and the library stays loaded. `cuFileDriverClose` is the name
        // that its old form has kept; the new one is told apart by a number.
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

/// # Safety
/// `F` is the type of the function of this name, and the library is never unloaded.
unsafe fn symbol<F: Copy>(library: &Library, name: &'static CStr) -> Result<F, CuFileError> {
    // SAFETY: as for this function.
    let found: Result<Symbol<'_, F>, _> = unsafe { library.get(name.to_bytes_with_nul()) };
    let found =
        found.map_err(|_| CuFileError::MissingFunction { name: name.to_str().unwrap_or("") });
    Ok(*found?)
}
