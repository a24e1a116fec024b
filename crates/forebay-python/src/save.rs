//! Writes safetensors files.

use std::collections::HashMap;
use std::path::PathBuf;

use forebay_format::huggingface::safetensors::encode_header;
use forebay_store::OutputFile;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::errors::{of_format, of_output, raise};

/// Writes tensors to a file that gets its name when it is complete. Each is a name, a type, a shape in elements and a
/// buffer of bytes.
#[pyfunction]
pub fn save(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<(String, String, Vec<usize>, PyBuffer<u8>)>,
    metadata: Option<HashMap<String, String>>,
) -> PyResult<()> {
    let mut entries = Vec::with_capacity(tensors.len());
    let mut contents = HashMap::with_capacity(tensors.len());
    for (name, ty, shape, buffer) in &tensors {
        if !buffer.is_c_contiguous() {
            let words = format!("the bytes of tensor {name:?} are not contiguous");
            return Err(raise(py, "OptionError", words));
        }
        entries.push((name.clone(), ty.clone(), shape.clone(), buffer.len_bytes()));
        contents.insert(name.clone(), buffer);
    }
    let made = encode_header(&path, entries, metadata);
    let (header, order) = made.map_err(|error| of_format(py, error))?;
    let spans: Vec<Span> = order.iter().map(|name| Span::of(contents[name])).collect();
    let write = || {
        let file = OutputFile::replace(&path)?;
        file.write_at(0, &header)?;
        let mut at = header.len() as u64;
        for span in &spans {
            file.write_at(at, span.bytes())?;
            at += span.length as u64;
        }
        file.commit()
    };
    py.detach(write).map_err(|error| of_output(py, &error))
}

/// Memory of a buffer that is held for the whole write.
struct Span {
    address: usize,
    length: usize,
}

impl Span {
    fn of(buffer: &PyBuffer<u8>) -> Span {
        Span { address: buffer.buf_ptr().expose_provenance(), length: buffer.len_bytes() }
    }

    fn bytes(&self) -> &[u8] {
        if self.length == 0 {
            return &[];
        }
        let first = std::ptr::with_exposed_provenance(self.address);
        // SAFETY: the caller of `save` holds the buffer, which is contiguous and has so many bytes. A program that
        // writes to it meanwhile gets a file with some of the old and some of the new bytes.
        unsafe { std::slice::from_raw_parts(first, self.length) }
    }
}
