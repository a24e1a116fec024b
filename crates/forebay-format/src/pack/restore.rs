//! Keeps the parts of a source that are not tensors, and puts the source's files together again.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use forebay_options::OptionName;

use super::{Conversion, DocumentKind, Embedded, Pack, PackSpan};
use crate::catalog::folder_of;
use crate::gguf::writer::GgufWriter;
use crate::huggingface::safetensors;
use crate::storage::open_regular;
use crate::{Catalog, Disk, FileIndex, FormatError, Source, TensorInfo, gguf};

/// Files of a Hugging Face folder that a pack keeps if they exist. They describe the model, its
/// tokenizer and templates, and the terms of its licence.
pub(crate) const FILES: [&str; 25] = [
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "README.md",
    "added_tokens.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "qwen.tiktoken",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// Largest file that is kept, in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Largest padding that a restored file may have for its header and for each tensor, in bytes.
const PADDING_BYTES_MAX: u64 = 1 << 20;

/// File of the source as it will be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RestoredFile {
    /// Name of the original file. GGUF files get a fixed name instead.
    pub name: String,
    pub bytes: u64,
    /// First bytes of the file, up to its tensor data.
    pub header: Vec<u8>,
    /// What to copy from the pack, in the order of the file. The gaps are zeros.
    pub spans: Vec<PackSpan>,
}

/// Returns the documents of `source` that a pack keeps beside the tensors.
///
/// # Errors
/// Returns [`FormatError::Io`] if a file cannot be read, and [`FormatError::LimitExceeded`] if a
/// file is too large. Returns other errors if headers changed since the catalog was opened.
pub fn source_documents(source: &Catalog) -> Result<Vec<Embedded>, FormatError> {
    let mut documents = Vec::new();
    let hugging_face = matches!(source.source, Source::HuggingFace(_));
    if hugging_face {
        for name in FILES {
            let path = source.root.join(name);
            // A folder of this name is none of the model's files; anything else that is no file is refused.
            if path.exists() && !path.is_dir() {
                let content = read_start(&path, FILE_BYTES_MAX + 1)?;
                if content.len() as u64 > FILE_BYTES_MAX {
                    return Err(FormatError::LimitExceeded {
                        path,
                        what: "the size of the file",
                        offset: 0,
                        found: content.len() as u64,
                        limit: FILE_BYTES_MAX,
                    });
                }
                let kind = DocumentKind::File;
                documents.push(Embedded { kind, name: name.into(), content, source_bytes: 0 });
            }
        }
    }
    let count = source.files.len();
    for (number, path) in source.files.iter().enumerate() {
        let index = FileIndex(number as u32);
        let (header_bytes, source_bytes, name) = if hugging_face {
            let (header, bytes) = safetensors::parse_file(path, index)?;
            if folder_of(path) != source.root {
                let why = "it is in a folder below the model's, and a pack keeps names of files only; put \
                           the weights beside config.json"
                    .to_owned();
                return Err(FormatError::Restore { path: path.clone(), why });
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (header.data_offset, bytes, name)
        } else {
            // The file's own name is not stored, so that the same bytes make the same pack.
            let (header, bytes) = gguf::parse::parse_file(&Disk, path, index)?;
            let name = match count {
                1 => "model.gguf".to_owned(),
                _ => format!("model-{:05}-of-{count:05}.gguf", number + 1),
            };
            (header.data_offset, bytes, name)
        };
        let content = read_start(path, header_bytes)?;
        documents.push(Embedded { kind: DocumentKind::Header, name, content, source_bytes });
    }
    Ok(documents)
}

fn read_start(path: &Path, bytes: u64) -> Result<Arc<[u8]>, FormatError> {
    let (file, _) = open_regular(path).map_err(FormatError::io(path))?;
    let mut content = Vec::new();
    file.take(bytes).read_to_end(&mut content).map_err(FormatError::io(path))?;
    Ok(content.into())
}

/// Returns the GGUF file that a pack was made from. A split set becomes one file.
///
/// # Errors
/// Returns [`FormatError::Restore`] if the pack was made from another source or lacks a tensor.
pub fn restore_gguf(catalog: &Catalog) -> Result<RestoredFile, FormatError> {
    let (Some(pack), Source::Gguf(metadata)) = (&catalog.pack, &catalog.source) else {
        return Err(refuse(
            catalog,
            format!(
                "it was not packed from GGUF; a pack of a Hugging Face folder is written back with {}",
                OptionName::ToHuggingFace
            ),
        ));
    };
    let headers = headers(pack);
    let mut parsed = Vec::new();
    for document in &headers {
        let path = catalog.files[0].join(&document.name);
        parsed.push(gguf::parse::parse_header(&document.content, &path, document.source_bytes)?);
    }
    if let ([document], [header]) = (&headers[..], &parsed[..]) {
        return restored(catalog, document, document.content.to_vec(), &header.tensors);
    }
    let mut writer = GgufWriter::new(&catalog.files[0]);
    for (key, value) in metadata.iter().filter(|(key, _)| !key.starts_with("split.")) {
        writer.set(key, value.clone())?;
    }
    for tensor in parsed.iter().flat_map(|header| &header.tensors) {
        writer.add_tensor(&tensor.name, tensor.ty, &tensor.shape)?;
    }
    let (header, tensors) = writer.into_header()?;
    let end = tensors.iter().map(|tensor| tensor.extent.end()).max().unwrap_or(0);
    let one = Embedded {
        kind: DocumentKind::Header,
        name: "model.gguf".to_owned(),
        content: Arc::from([]),
        source_bytes: end.max(header.len() as u64),
    };
    restored(catalog, &one, header, &tensors)
}

/// Returns the files beside the weights of the folder that a pack was made from, and its weight
/// files.
///
/// # Errors
/// Returns [`FormatError::Restore`] if the pack was made from another source or lacks a tensor.
pub fn restore_hugging_face(
    catalog: &Catalog,
) -> Result<(Vec<Embedded>, Vec<RestoredFile>), FormatError> {
    let (Some(pack), Source::HuggingFace(_)) = (&catalog.pack, &catalog.source) else {
        return Err(refuse(
            catalog,
            format!(
                "it was not packed from a Hugging Face folder; a pack of a GGUF file is written back with {}",
                OptionName::ToGguf
            ),
        ));
    };
    let mut files = Vec::new();
    for document in headers(pack) {
        let path = catalog.files[0].join(&document.name);
        let (content, bytes) = (&document.content, document.source_bytes);
        let header = safetensors::parse_header(content, &path, bytes)?;
        files.push(restored(catalog, document, content.to_vec(), &header.tensors)?);
    }
    let small = pack.documents.iter().filter(|document| document.kind == DocumentKind::File);
    Ok((small.cloned().collect(), files))
}

fn headers(pack: &Pack) -> Vec<&Embedded> {
    pack.documents.iter().filter(|document| document.kind == DocumentKind::Header).collect()
}

/// Returns a file with these tensors at the offsets that its header gives them.
fn restored(
    catalog: &Catalog,
    document: &Embedded,
    header: Vec<u8>,
    tensors: &[TensorInfo],
) -> Result<RestoredFile, FormatError> {
    let mut spans = Vec::new();
    let mut most = header.len() as u64 + PADDING_BYTES_MAX;
    for tensor in tensors {
        let index = catalog.tensor_index(&tensor.name);
        let found = index.map(|index| (index, &catalog.tensors()[index]));
        let same =
            found.filter(|(_, found)| found.ty.plain() == tensor.ty && found.shape == tensor.shape);
        let Some((index, found)) = same else {
            let why = format!("its file had a tensor {:?} that the pack lacks", tensor.name);
            return Err(refuse(catalog, &why));
        };
        let mut to = tensor.extent.offset;
        for from in found.extents() {
            let conversion = found.ty.compact().map(Conversion::Plain);
            let span = PackSpan { to, from, tensor: index, conversion };
            to = span.end();
            spans.push(span);
        }
        most = most.saturating_add(tensor.bytes()).saturating_add(PADDING_BYTES_MAX);
    }
    if document.source_bytes > most {
        return Err(refuse(catalog, "its file had more bytes than its tensors account for"));
    }
    spans.sort_by_key(|span| span.to);
    let name = document.name.clone();
    Ok(RestoredFile { name, bytes: document.source_bytes, header, spans })
}

fn refuse(catalog: &Catalog, why: impl Into<String>) -> FormatError {
    let path = catalog.files.first().cloned().unwrap_or_default();
    FormatError::Restore { path, why: why.into() }
}
