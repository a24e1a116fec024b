//! Where the bytes of a group are: in RAM for good, or in files.

use std::borrow::Cow;
use std::sync::Arc;

use forebay_codec::{CHUNK_BYTES, Codec, Compact, Decoder, Weights, decode_compact};
use forebay_format::pack::Chunk;
use forebay_store::{BlockLayout, Extent, FileSet, Part};

use crate::coded::{CodedChunk, SharedBytes, encode};
use crate::device::DeviceError;
use crate::expansion::Expansion;
use crate::room::aligned;

/// Tensors in files that are smaller than this are held in RAM: a disk reads few bytes as slowly as many.
const SMALL_BYTES: u64 = 256 << 10;
/// Kernels decode to addresses that are multiples of this.
const DECODED_ALIGNMENT: u64 = 16;

/// One tensor of a group.
pub struct GroupTensor<'a> {
    pub from: TensorFrom<'a>,
    /// What its elements are, if they can be coded.
    pub weights: Option<Weights>,
}

/// Where a tensor comes from.
pub enum TensorFrom<'a> {
    /// From RAM. The bytes are copied.
    Ram(&'a [u8]),
    File(TensorFile),
}

/// Where a tensor is in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorFile {
    /// Number of the source.
    pub source: usize,
    /// Its bytes. Packs count as if all their blocks were decoded.
    pub extent: Extent,
    pub form: FileForm,
}

/// How the weights of a tensor are in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileForm {
    /// As they are in a device.
    Plain,
    /// Compact BF16, which is BF16 once it is in RAM.
    Compact(Compact),
    /// Weights of another type, which they keep until they are in a device.
    Other(Expansion),
}

impl FileForm {
    /// Returns the bytes of a block in the file and in a device.
    fn block(self) -> (u64, u64) {
        match self {
            FileForm::Plain => (1, 1),
            FileForm::Compact(of) => (of.bytes() as u64, of.plain_bytes() as u64),
            FileForm::Other(of) => of.block(),
        }
    }

    fn expansion(self) -> Option<Expansion> {
        match self {
            FileForm::Other(of) => Some(of),
            FileForm::Plain | FileForm::Compact(_) => None,
        }
    }

    /// Returns weights as they are in a device, unless that is how they are here.
    fn expanded(self, bytes: &[u8]) -> Result<Option<Vec<u8>>, DeviceError> {
        let (block, plain) = self.block();
        let zeros = || vec![0; (bytes.len() as u64 / block * plain) as usize];
        let (out, decoded) = match self {
            FileForm::Plain => return Ok(None),
            FileForm::Compact(of) => {
                let mut out = zeros();
                let decoded = decode_compact(of, bytes, &mut out);
                (out, decoded.map_err(|error| damaged(&error)))
            }
            FileForm::Other(of) => {
                let mut out = zeros();
                let decoded = of.decode(bytes, &mut out);
                (out, decoded.map_err(|error| damaged(&error)))
            }
        };
        decoded.map(|()| Some(out))
    }
}

impl TensorFile {
    /// Returns the bytes of the tensor in a device.
    fn bytes(&self) -> u64 {
        let (block, plain) = self.form.block();
        self.extent.length / block * plain
    }
}

/// Where a tensor is in its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorPlace {
    /// Where it begins in the device, counted from the first byte of the group.
    pub at: u64,
    pub bytes: u64,
    /// Where it is in a file, if it comes from one.
    pub file: Option<TensorFile>,
}

/// Files with weights.
pub struct WeightFiles {
    /// With offsets as if all blocks were decoded.
    pub decoded: FileSet,
    /// With offsets of the files themselves.
    pub stored: FileSet,
}

impl WeightFiles {
    pub fn new(files: FileSet) -> WeightFiles {
        WeightFiles { stored: files.as_stored(), decoded: files }
    }
}

/// Tensors that are in a device together.
pub struct StoredGroup {
    pub tensors: Vec<TensorPlace>,
    /// Bytes that the group needs in a device.
    pub bytes: u64,
    /// What the elements of the tensors are, if they can be coded.
    weights: Vec<Option<Weights>>,
    /// Chunks that are in RAM for good.
    pub held: Vec<CodedChunk>,
    /// The other chunks.
    pub reads: Vec<FileRead>,
}

/// Chunks beside each other in a file, which are read together.
pub struct FileRead {
    /// Where they are read to in a buffer. Part `n` is chunk `n`.
    pub layout: BlockLayout,
    pub chunks: Vec<FileChunk>,
    pub source: usize,
    /// True if they are read as the file has them. Else the read decodes them.
    pub is_stored: bool,
}

/// A chunk in a file.
#[derive(Debug, Clone, Copy)]
pub struct FileChunk {
    /// How it is coded when it is read: [`Codec::Raw`] or [`Codec::Exponents`].
    pub codec: Codec,
    extent: Extent,
    /// Number of zeros at the end of the extent.
    pub padding: usize,
    /// Where its bytes go, counted from the first byte of the group.
    pub at: u64,
    /// Number of bytes when they are decoded.
    pub bytes: usize,
    /// What its elements are, if they can be coded and are not yet.
    pub weights: Option<Weights>,
    form: FileForm,
    is_stored: bool,
}

impl StoredGroup {
    /// Finds the chunks of tensors. What is to be in RAM is coded with so many threads, if `codes`.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or ends before a tensor does.
    ///
    /// # Panics
    /// Panics if a tensor comes from a source that is not among these.
    pub fn new(
        tensors: &[GroupTensor<'_>],
        sources: &[WeightFiles],
        threads: usize,
        codes: bool,
    ) -> Result<StoredGroup, DeviceError> {
        let (mut places, mut end) = (Vec::new(), 0);
        // What is in RAM for good: where it goes, its bytes, and what they are if they are to be coded.
        let mut here: Vec<(u64, Cow<'_, [u8]>, Option<Weights>)> = Vec::new();
        let mut chunks: Vec<Vec<FileChunk>> = sources.iter().map(|_| Vec::new()).collect();
        for tensor in tensors {
            let weights = tensor.weights.filter(|_| codes);
            let (bytes, file) = match tensor.from {
                TensorFrom::Ram(bytes) => {
                    here.push((end, bytes.into(), weights));
                    (bytes.len() as u64, None)
                }
                TensorFrom::File(file) => {
                    let files = &sources[file.source];
                    match file.bytes() < SMALL_BYTES {
                        true => here.push((end, read_all(files, &file)?.into(), weights)),
                        false => chunks[file.source].extend(files.chunks(&file, end, weights)?),
                    }
                    (file.bytes(), Some(file))
                }
            };
            places.push(TensorPlace { at: end, bytes, file });
            end += aligned(bytes);
        }
        let mut plain = Vec::new();
        for (at, bytes, weights) in &here {
            for (index, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
                plain.push((at + (index * CHUNK_BYTES) as u64, chunk, *weights));
            }
        }
        let held = encode(&plain, threads).map_err(|error| DeviceError::of_source(&error))?;
        let sources = sources.iter().zip(chunks).enumerate();
        let reads = sources.flat_map(|(source, (files, chunks))| files.reads(source, chunks));
        let reads = reads.collect();
        let weights = tensors.iter().map(|tensor| tensor.weights).collect();
        Ok(StoredGroup { tensors: places, bytes: end, weights, held, reads })
    }

    /// Returns the bytes of one tensor, from RAM or from its file.
    ///
    /// # Errors
    /// Returns an error if they cannot be read, or are damaged.
    pub fn read_tensor(
        &self,
        tensor: usize,
        sources: &[WeightFiles],
    ) -> Result<Vec<u8>, DeviceError> {
        let place = self.tensors[tensor];
        match place.file {
            Some(file) => read_all(&sources[file.source], &file),
            None => decode_tensor(place, &self.held),
        }
    }

    /// Returns what the elements of the tensors are, if they can be coded.
    pub fn weights(&self) -> &[Option<Weights>] {
        &self.weights
    }

    /// Returns the bytes of the other chunks in their files.
    pub fn read_bytes(&self) -> u64 {
        self.reads.iter().flat_map(|read| &read.chunks).map(FileChunk::bytes_read).sum()
    }
}

/// Decodes the chunks of one tensor, which are among these.
///
/// # Errors
/// Returns an error if a chunk is damaged.
pub fn decode_tensor(place: TensorPlace, chunks: &[CodedChunk]) -> Result<Vec<u8>, DeviceError> {
    let TensorPlace { at, bytes, .. } = place;
    let mut out = vec![0; bytes as usize];
    let mut decoder = Decoder::default();
    for chunk in chunks.iter().filter(|chunk| (at..at + bytes).contains(&chunk.at)) {
        let to = &mut out[(chunk.at - at) as usize..][..chunk.bytes];
        chunk.decode(&mut decoder, to)?;
    }
    Ok(out)
}

/// Tells that weights are damaged.
pub fn damaged(error: &dyn std::fmt::Display) -> DeviceError {
    DeviceError::Source(format!("weights are damaged: {error}"))
}

/// Reads a tensor to memory of its own.
fn read_all(files: &WeightFiles, file: &TensorFile) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0; file.extent.length as usize];
    let read = files.decoded.read_exact(file.extent, &mut bytes);
    read.map_err(|error| DeviceError::of_source(&error))?;
    Ok(file.form.expanded(&bytes)?.unwrap_or(bytes))
}

impl WeightFiles {
    /// Returns the chunks of a tensor whose first byte goes to `at`.
    fn chunks(
        &self,
        file: &TensorFile,
        at: u64,
        weights: Option<Weights>,
    ) -> Result<Vec<FileChunk>, DeviceError> {
        let extent = file.extent;
        let has = self.decoded.file_bytes(extent.file).unwrap_or(0);
        let coded = self.decoded.coded_chunks(extent);
        let is_coded = !coded.is_empty();
        if !is_coded && extent.end() > has {
            let words =
                format!("weights end at byte {}, but the file ends at byte {has}", extent.end());
            return Err(DeviceError::Source(words));
        }
        let as_stored = coded.iter().all(|chunk| {
            let is_inside = chunk.offset >= extent.offset && chunk.end() <= extent.end();
            let to = at + chunk.offset.saturating_sub(extent.offset);
            let can_decode = match chunk.codec {
                Codec::Raw => true,
                Codec::Exponents => to.is_multiple_of(DECODED_ALIGNMENT),
                _ => false,
            };
            is_inside && can_decode
        });
        if is_coded && as_stored && file.form == FileForm::Plain {
            let chunk = |chunk: &Chunk| FileChunk {
                codec: chunk.codec,
                extent: Extent {
                    file: extent.file,
                    offset: chunk.stored_offset,
                    length: chunk.stored_bytes,
                },
                padding: chunk.padding as usize,
                at: at + chunk.offset - extent.offset,
                bytes: chunk.bytes as usize,
                weights: None,
                form: FileForm::Plain,
                is_stored: true,
            };
            return Ok(coded.iter().map(chunk).collect());
        }
        let from = if is_coded { extent } else { self.decoded.stored(extent) };
        let (block, plain) = file.form.block();
        let blocks = CHUNK_BYTES as u64 / plain;
        let pieces = (0..extent.length).step_by((blocks * block) as usize).map(|offset| {
            let length = (extent.length - offset).min(blocks * block);
            FileChunk {
                codec: Codec::Raw,
                extent: Extent { file: extent.file, offset: from.offset + offset, length },
                padding: 0,
                at: at + offset / block * plain,
                bytes: (length / block * plain) as usize,
                // What keeps its type is not coded.
                weights: weights.filter(|_| file.form.expansion().is_none()),
                form: file.form,
                is_stored: !is_coded,
            }
        });
        Ok(pieces.collect())
    }

    /// Joins chunks that are beside each other in a file.
    fn reads(&self, source: usize, mut chunks: Vec<FileChunk>) -> Vec<FileRead> {
        chunks.sort_by_key(|chunk| (chunk.is_stored, chunk.extent.file.0, chunk.extent.offset));
        let joins = |first: &FileChunk, last: &FileChunk, next: &FileChunk| {
            last.is_stored == next.is_stored
                && last.extent.file == next.extent.file
                && last.extent.end() == next.extent.offset
                && next.extent.end() - first.extent.offset <= CHUNK_BYTES as u64
        };
        let mut reads = Vec::new();
        let mut rest = &chunks[..];
        while let Some(first) = rest.first() {
            let more = rest.windows(2).take_while(|pair| joins(first, &pair[0], &pair[1])).count();
            let (own, others) = rest.split_at(1 + more);
            rest = others;
            let files = if first.is_stored { &self.stored } else { &self.decoded };
            let extents: Vec<Extent> = own.iter().map(|chunk| chunk.extent).collect();
            let layout = files.plan(&extents, files.alignment());
            let (chunks, is_stored) = (own.to_vec(), first.is_stored);
            reads.push(FileRead { layout, chunks, source, is_stored });
        }
        reads
    }
}

impl FileChunk {
    /// Returns the bytes that are read for the chunk.
    pub fn bytes_read(&self) -> u64 {
        self.extent.length
    }

    /// Returns the bytes of the chunk in RAM at most.
    pub fn bytes_in_ram(&self) -> u64 {
        match self.form {
            FileForm::Compact(_) => self.bytes as u64,
            FileForm::Plain | FileForm::Other(_) => self.extent.length,
        }
    }
}

impl FileRead {
    /// Returns the chunks in a buffer to which they were read.
    pub fn chunks_in(&self, buffer: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Vec<CodedChunk> {
        let chunks = self.chunks.iter().zip(self.layout.parts.iter());
        let chunk = |(chunk, part): (&FileChunk, &Part)| {
            let end = part.at + part.extent.length as usize - chunk.padding;
            let coded = SharedBytes::of(Arc::clone(&buffer), part.at..end);
            let (codec, expansion) = (chunk.codec, chunk.form.expansion());
            CodedChunk { codec, coded, at: chunk.at, bytes: chunk.bytes, expansion }
        };
        chunks.map(chunk).collect()
    }

    /// Makes BF16 of chunks of this read that are compact.
    ///
    /// # Errors
    /// Returns an error if one is damaged.
    pub fn expand(&self, chunks: &mut [CodedChunk]) -> Result<(), DeviceError> {
        for (chunk, of) in chunks.iter_mut().zip(&self.chunks) {
            if let FileForm::Compact(_) = of.form
                && let Some(plain) = of.form.expanded(&chunk.coded)?
            {
                chunk.coded = plain.into();
            }
        }
        Ok(())
    }
}
