//! Compares device memory with the files that it was filled from.

use std::time::Instant;

use forebay_codec::{Compact, decode_compact};
use forebay_cuda::{DevicePtr, Gpu};
use forebay_store::{BlockLabel, Extent, FileSet, UploadPart};

use super::hold::HeldTensor;
use super::request::ReadBack;
use crate::load::error::LoadError;

/// Number of bytes that are read back at a time.
const CHECK_BYTES: u64 = 16 << 20;
/// Byte that fills device memory before a load that is to be checked.
const POISON: u8 = 0xa5;

/// Returns the pointer to `bytes` bytes at address `to`, if they lie in one of the pieces of `memory`.
pub(crate) fn place_in(memory: &[DevicePtr<u8>], to: u64, bytes: usize) -> Option<DevicePtr<u8>> {
    let mut places = memory.iter().filter_map(|memory| memory.at(to));
    places.find(|place| place.len() >= bytes)
}

/// Returns the same pointer, for parts that were planned to lie in `memory`.
fn planned(memory: &[DevicePtr<u8>], to: u64, bytes: u64) -> DevicePtr<u8> {
    place_in(memory, to, bytes as usize).expect("parts lie in the memory that is planned for them")
}

/// Overwrites `parts`, which lie in `memory`. Otherwise, data of an earlier run or of another program could pass for
/// loaded data.
pub(crate) fn poison(
    gpu: &Gpu,
    parts: &[UploadPart],
    memory: &[DevicePtr<u8>],
) -> Result<(), LoadError> {
    for part in parts {
        let to = planned(memory, part.to, part.extent.length);
        gpu.fill(to, POISON, part.extent.length as usize)?;
    }
    Ok(gpu.synchronize()?)
}

/// Returns the name of the content that an extent belongs to.
pub(crate) fn name_of(contents: &[(String, Extent)], of: &Extent) -> String {
    let holds = |extent: &Extent| {
        extent.file == of.file && (extent.offset..extent.end()).contains(&of.offset)
    };
    let found = contents.iter().find(|(_, extent)| holds(extent));
    found.map_or_else(|| "weights".to_owned(), |(name, _)| name.clone())
}

/// Returns parts as they were read.
pub(crate) fn as_read(parts: &[UploadPart]) -> impl Iterator<Item = (UploadPart, Option<Compact>)> {
    parts.iter().map(|part| (*part, None))
}

/// Returns where the pieces of tensors are, and the compact blocks that were decoded to these places.
pub(crate) fn as_decoded(
    tensors: &[HeldTensor],
) -> impl Iterator<Item = (UploadPart, Option<Compact>)> {
    tensors.iter().flat_map(|tensor| {
        let pieces = tensor.info.extents().count().max(1) as u64;
        let bytes = tensor.bytes() / pieces;
        tensor.info.extents().enumerate().map(move |(number, extent)| {
            let to = tensor.address + number as u64 * bytes;
            let label = BlockLabel::Other(number as u64);
            (UploadPart { label, extent, to }, tensor.decoded_from())
        })
    })
}

/// Compares all parts, which lie in `memory`, with the files. `name` returns the name for an extent, for the error.
pub(crate) fn read_back(
    gpu: &Gpu,
    files: &FileSet,
    parts: impl Iterator<Item = (UploadPart, Option<Compact>)>,
    memory: &[DevicePtr<u8>],
    name: &dyn Fn(&Extent) -> String,
) -> Result<ReadBack, LoadError> {
    let started = Instant::now();
    let mut bytes = 0;
    for (part, compact) in parts {
        compare(gpu, files, memory, part, compact, name)?;
        bytes += part.extent.length;
    }
    Ok(ReadBack { bytes, seconds: started.elapsed().as_secs_f64() })
}

/// Compares device memory at `part.to` with the bytes of a file, or with the BF16 weights of which they are compact blocks.
fn compare(
    gpu: &Gpu,
    files: &FileSet,
    memory: &[DevicePtr<u8>],
    part: UploadPart,
    compact: Option<Compact>,
    name: &dyn Fn(&Extent) -> String,
) -> Result<(), LoadError> {
    let (read, held) = compact.map_or((1, 1), |of| (of.bytes() as u64, of.plain_bytes() as u64));
    let (mut done, mut stored) = (0, Vec::new());
    while done < part.extent.length {
        let length = (CHECK_BYTES / read * read).min(part.extent.length - done);
        let offset = part.extent.offset + done;
        let differs = |at: u64| LoadError::ReadBack {
            place: name(&part.extent),
            file: files.path(part.extent.file).unwrap_or_default(),
            offset: offset + at,
        };
        stored.resize(length as usize, 0);
        files.read_exact(Extent { offset, length, ..part.extent }, &mut stored)?;
        let mut decoded = Vec::new();
        let expected = match compact {
            None => &stored,
            Some(of) => {
                decoded.resize((length / read * held) as usize, 0);
                decode_compact(of, &stored, &mut decoded).map_err(|_| differs(0))?;
                &decoded
            }
        };
        let from = planned(memory, part.to + done / read * held, expected.len() as u64);
        let found = gpu.download(from, expected.len())?;
        // The whole piece is compared first, at the speed of memory.
        if found != *expected {
            let mut pairs = found.iter().zip(expected);
            let at = pairs.position(|(found, expected)| found != expected).unwrap_or(0) as u64;
            return Err(differs(at / held * read));
        }
        done += length;
    }
    Ok(())
}
