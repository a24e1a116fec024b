//! Errors of reading and writing model files.

use std::path::{Path, PathBuf};

use crate::TensorType;

/// Reason why a model could not be opened, a block could not be decoded or a file could not be
/// written.
///
/// Offsets are bytes from the start of the file that `path` names. The path is empty if the bytes
/// were parsed from memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    #[error("{}: {source}", show(path))]
    Io { path: PathBuf, source: std::io::Error },

    #[error(
        "{}: no model here: {why}. Give a .gguf file, or a folder with config.json and model.safetensors",
        show(path)
    )]
    NoModel { path: PathBuf, why: String },

    #[error("{}: not a GGUF file: {seems}", show(path))]
    NotGguf { path: PathBuf, seems: String },
    #[error("{}: not a GGUF file: the letters GGUF are missing at its start", show(path))]
    WrongMagic { path: PathBuf, found: [u8; 4] },

    #[error(
        "{}: GGUF version {version} is not supported (2 and 3 are, little-endian); convert the file again",
        show(path)
    )]
    UnsupportedVersion { path: PathBuf, version: u32 },

    #[error(
        "{}: the file ends at byte {file_bytes}, but {what} at byte {offset} needs {needed} bytes; \
         the file is cut off or damaged, download it again",
        show(path)
    )]
    Truncated { path: PathBuf, what: &'static str, offset: u64, needed: u64, file_bytes: u64 },

    #[error(
        "{}: {what} at byte {offset} claims {found}, the limit is {limit}; the file is damaged",
        show(path)
    )]
    LimitExceeded { path: PathBuf, what: &'static str, offset: u64, found: u64, limit: u64 },

    #[error("{}: {what} at byte {offset} is not valid UTF-8; the file is damaged", show(path))]
    NotUtf8 { path: PathBuf, what: &'static str, offset: u64 },

    #[error("{}: {what} at byte {offset} is empty; the file is damaged", show(path))]
    EmptyName { path: PathBuf, what: &'static str, offset: u64 },

    #[error(
        "{}: the value of {key:?} at byte {offset} has the unknown type {id}; the file is damaged or of a newer format",
        show(path)
    )]
    UnknownValueType { path: PathBuf, key: String, offset: u64, id: u32 },

    #[error(
        "{}: {key:?} at byte {offset} is a bool of value {found}; 0 and 1 are allowed, the file is damaged",
        show(path)
    )]
    InvalidBool { path: PathBuf, key: String, offset: u64, found: u8 },

    #[error("{}: the metadata key {key:?} appears twice; the file is damaged", show(path))]
    DuplicateKey { path: PathBuf, key: String },

    #[error(
        "{}: general.alignment is {found}; a power of two up to {limit} is needed; convert the file again",
        show(path)
    )]
    InvalidAlignment { path: PathBuf, found: String, limit: u64 },

    #[error(
        "the metadata key {key:?} is missing; the file was made by a converter that does not know this model"
    )]
    MissingKey { key: String },

    #[error("the metadata key {key:?} holds {found}, where {expected} is needed")]
    WrongKeyType { key: String, expected: &'static str, found: String },

    #[error(
        "{}: tensor {tensor:?} has type {id}, which is unknown; known are {}",
        show(path),
        known_types()
    )]
    UnknownTensorType { path: PathBuf, tensor: String, id: u32 },

    #[error(
        "{}: tensor {tensor:?} has dtype {dtype}, which is not supported; known are {}",
        show(path),
        known_types()
    )]
    UnsupportedDtype { path: PathBuf, tensor: String, dtype: String },

    #[error("{}: tensor {tensor:?} appears twice; the file is damaged", show(path))]
    DuplicateTensor { path: PathBuf, tensor: String },

    #[error(
        "{}: tensor {tensor:?} claims {found} dimensions at byte {offset}; 1 to {limit} are allowed, \
         the file is damaged",
        show(path)
    )]
    DimensionCount { path: PathBuf, tensor: String, offset: u64, found: u32, limit: u32 },

    #[error(
        "{}: tensor {tensor:?} of type {ty} has the shape {shape:?}: {why}; the file is damaged",
        show(path)
    )]
    InvalidShape {
        path: PathBuf,
        tensor: String,
        ty: TensorType,
        shape: Vec<u64>,
        why: &'static str,
    },

    #[error(
        "{}: the data of tensor {tensor:?} at byte {offset} is not aligned to {alignment} bytes; the file is damaged, convert it again",
        show(path)
    )]
    Misaligned { path: PathBuf, tensor: String, offset: u64, alignment: u64 },

    #[error(
        "{}: tensor {tensor:?} lies at byte {offset} and takes {length} bytes, but the file has {file_bytes}; \
         the file is cut off or damaged, download it again",
        show(path)
    )]
    TensorOutOfRange { path: PathBuf, tensor: String, offset: u64, length: u64, file_bytes: u64 },

    #[error(
        "{}: the data of tensors {tensor:?} and {other:?} overlap at byte {offset}; the file is damaged",
        show(path)
    )]
    TensorsOverlap { path: PathBuf, tensor: String, other: String, offset: u64 },

    #[error(
        "{}: this is one file of a split set, and {} is missing beside it",
        show(path),
        show(missing)
    )]
    MissingSplitFile { path: PathBuf, missing: PathBuf },

    #[error(
        "{}: the split set does not fit together: {what} is {found}, expected {expected}; \
         get all files of the set from one source",
        show(path)
    )]
    SplitMismatch { path: PathBuf, what: &'static str, expected: u64, found: u64 },

    #[error(
        "{}: the file has the name of one of a split set, but its metadata lacks {key:?}; \
         get all files of the set from one source",
        show(path)
    )]
    NotInSplitSet { path: PathBuf, key: &'static str },

    #[error(
        "{}: the file says that it is one of {count} split files, but its name is not of the form \
         NAME-00001-of-{count:05}.gguf; give the files their original names",
        show(path)
    )]
    SplitName { path: PathBuf, count: u64 },

    #[error("{}: not valid JSON: {source}", show(path))]
    Json { path: PathBuf, source: serde_json::Error },

    #[error("{}: {what}", show(path))]
    InvalidJson { path: PathBuf, what: String },

    #[error("{}: the safetensors header is not valid: {source}", show(path))]
    SafetensorsHeader { path: PathBuf, source: serde_json::Error },

    #[error(
        "{}: the safetensors tensors end at byte {expected}, but the file has {found} bytes; \
         it is cut off or damaged, download it again",
        show(path)
    )]
    SafetensorsSize { path: PathBuf, expected: u64, found: u64 },

    #[error("{}: the index names the file {shard:?}, which is missing; download it", show(path))]
    MissingShard { path: PathBuf, shard: String },

    #[error(
        "{}: the index names the file {shard:?}; only plain file names of the same folder are allowed",
        show(path)
    )]
    InvalidShardName { path: PathBuf, shard: String },

    #[error(
        "{}: tensor {tensor:?} is said to be in {shard:?}, but is not; index and files are of different models",
        show(path)
    )]
    MissingTensor { path: PathBuf, tensor: String, shard: String },

    #[error(
        "{}: not a pack: it starts with {found:02x?} where \"FBAY\" belongs; \
         check that the download is complete and not a text page",
        show(path)
    )]
    NotAPack { path: PathBuf, found: Vec<u8> },

    #[error(
        "{}: the pack has format version {major}.{minor}, this build reads versions 1 and 2; \
         use a newer forebay, or pack the model again",
        show(path)
    )]
    PackVersion { path: PathBuf, major: u16, minor: u16 },

    #[error(
        "{}: {what} at byte {offset} is damaged: its checksum is {found:016x}, {expected:016x} was \
         written; get the file again",
        show(path)
    )]
    PackChecksum { path: PathBuf, what: String, offset: u64, expected: u64, found: u64 },

    #[error("{}: the pack is invalid at byte {offset}: {what}; get the file again", show(path))]
    PackDamaged { path: PathBuf, offset: u64, what: String },

    #[error(
        "{}: {block} is stored with codec {codec} version {version}, which this build does not know \
         (it knows codecs 0 to 3); use a newer forebay, or pack the model again",
        show(path)
    )]
    PackCodec { path: PathBuf, block: String, codec: u16, version: u16 },

    #[error("{}: the source cannot be restored: {why}", show(path))]
    Restore { path: PathBuf, why: String },

    #[error("values of type {ty} cannot be decoded to f32")]
    NotDequantizable { ty: TensorType },

    #[error(
        "{data_bytes} bytes of type {ty} do not decode to {elements} values: {ty} has blocks of \
         {} values in {} bytes", ty.block_elements(), ty.block_bytes()
    )]
    DequantizeLength { ty: TensorType, data_bytes: usize, elements: usize },

    #[error("{}: cannot write tensor {tensor:?}: {why}", show(path))]
    WriteTensor { path: PathBuf, tensor: String, why: String },

    #[error("{}: cannot write the metadata key {key:?}: {why}", show(path))]
    WriteKey { path: PathBuf, key: String, why: String },

    #[error("{}: cannot write the file: {why}", show(path))]
    WriteFile { path: PathBuf, why: String },
}

impl FormatError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

fn show(path: &Path) -> String {
    if path.as_os_str().is_empty() { "in memory".to_owned() } else { path.display().to_string() }
}

fn known_types() -> String {
    let names: Vec<&str> = TensorType::all().iter().map(|ty| ty.name()).collect();
    names.join(" ")
}
