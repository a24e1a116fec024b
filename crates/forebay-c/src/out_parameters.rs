//! Access to addresses that the caller passed.

use std::ffi::{CStr, c_char};

use crate::status::Failure;

/// Writes to an address that the caller passed.
///
/// # Safety
/// `place` is null or valid for a write.
pub unsafe fn put<T>(place: *mut T, value: T, name: &str) -> Result<(), Failure> {
    if place.is_null() {
        return Err(Failure::argument(&format!("{name} is a null pointer")));
    }
    // SAFETY: not null, and valid as the caller promises.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

/// # Safety
/// `text` is null or valid for writes of `capacity` bytes.
pub unsafe fn put_text(words: &str, text: *mut c_char, capacity: usize) -> Result<(), Failure> {
    if text.is_null() || capacity == 0 {
        return Err(Failure::argument("there is no room for the text"));
    }
    let mut length = words.len().min(capacity - 1);
    while !words.is_char_boundary(length) {
        length -= 1;
    }
    // SAFETY: length + 1 <= capacity, and the caller promises that many bytes.
    unsafe {
        text.cast::<u8>().copy_from_nonoverlapping(words.as_ptr(), length);
        text.add(length).write(0);
    }
    Ok(())
}

/// Writes a structure whose size in the caller's header is `capacity`. There is one version so far,
/// so the sizes must be equal.
///
/// # Safety
/// `place` is null or valid for writes of `capacity` bytes.
pub unsafe fn put_struct<T>(
    place: *mut T,
    capacity: usize,
    value: T,
    name: &str,
) -> Result<(), Failure> {
    if place.is_null() {
        return Err(Failure::argument(&format!("{name} is a null pointer")));
    }
    if capacity != size_of::<T>() {
        let known = size_of::<T>();
        return Err(Failure::argument(&format!(
            "{name} has {capacity} bytes, not {known}: header and library differ"
        )));
    }
    // SAFETY: not null, and valid for that many bytes as the caller promises.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

/// # Safety
/// `text` is null or a text that ends with a zero byte.
pub unsafe fn bytes_of<'a>(text: *const c_char, name: &str) -> Result<&'a [u8], Failure> {
    if text.is_null() {
        return Err(Failure::argument(&format!("{name} is a null pointer")));
    }
    // SAFETY: not null, and ends with a zero byte as promised.
    Ok(unsafe { CStr::from_ptr(text) }.to_bytes())
}
